"""Networks on volumes: convolutions over frames, rows and columns, and what is between them, stay in NDHWC."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.compiler import compile
from tests.engine.nodes.test_operators import Call

_NUMBERS = torch.randn(50_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _weights(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return constant filters that keep results of order one."""
    count = math.prod(shape)
    return _NUMBERS[:count].to(x.device, x.dtype).view(shape) * (shape[0] / count) ** 0.5


def _vector(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, size, dtype=torch.float64).to(x.dtype)


LAYERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "filter over all dimensions": (
        lambda x: F.conv3d(x, _weights(x, 40, 32, 3, 3, 3), _vector(x, 40), padding=1), (2, 32, 4, 5, 6),
    ),
    "strides, dilation and uneven padding": (
        lambda x: F.conv3d(x, _weights(x, 24, 36, 2, 3, 1), None, (2, 1, 2), (1, 2, 0), (2, 1, 1)), (1, 36, 5, 4, 7),
    ),
    "one frame and more padding": (
        lambda x: F.conv3d(x, _weights(x, 8, 64, 3, 2, 2), None, 1, (2, 0, 1)), (3, 64, 1, 3, 2),
    ),
    "few channels, whose frames are stacked": (
        lambda x: F.conv3d(x, _weights(x, 16, 3, 3, 5, 5), _vector(x, 16), (2, 1, 2), (1, 2, 2), (2, 1, 1)),
        (2, 3, 7, 6, 7),
    ),
    "a function of a sum": (
        lambda x: x + F.silu(F.conv3d(x, _weights(x, 32, 32, 3, 3, 3), padding=1) + x), (2, 32, 3, 4, 5),
    ),
    "windows side by side, transposed": (
        lambda x: F.conv_transpose3d(x, _weights(x, 32, 16, 2, 1, 3), _vector(x, 16), (2, 1, 3)), (2, 32, 3, 2, 4),
    ),
    "pools": (
        lambda x: F.avg_pool3d(F.max_pool3d(x, 3, 2, 1, ceil_mode=True), (2, 1, 3), 1, (1, 0, 1), False, False),
        (2, 8, 5, 6, 7),
    ),
    "resizing": (
        lambda x: F.interpolate(F.interpolate(x, size=(5, 6, 4)), scale_factor=(1.5, 2, 1), mode="trilinear"),
        (2, 8, 3, 2, 4),
    ),
    "concatenated channels": (
        lambda x: F.conv3d(torch.cat([x, F.max_pool3d(x, 3, 1, 1)], 1), _weights(x, 8, 48, 2, 2, 2)),
        (2, 24, 3, 4, 3),
    ),
}  # fmt: skip


@pytest.mark.share(5)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_volumes_have_kernels(name: str) -> None:
    function, shape = LAYERS[name]
    model = Call(lambda x: function(x.sin()))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        exact = model(x.double())
        # A few roundings per result: to bf16, and of the operands of products to TF32.
        most = 4 * max(torch.finfo(dtype).eps, 2.0**-10) * float(exact.abs().max())
        kind = "tf32" if dtype == torch.float32 else "bf16"
        engine = compile(model, x.float(), dtype=kind, device="twin")
        assert not engine.explain(x.float()).fallbacks
        torch.testing.assert_close(engine(x.float()).double(), exact, rtol=0, atol=most)
        one = compile(model, x.float(), dtype=kind, device="cpu")(x[:1].float())
        torch.testing.assert_close(one.double(), model(x[:1].double()), rtol=0, atol=most)


class _Block(nn.Sequential):
    def __init__(self, channels: int, filters: int) -> None:
        norm = nn.BatchNorm3d(filters)
        super().__init__(nn.Conv3d(channels, filters, 3, padding=1, bias=False), norm, nn.ReLU())
        with torch.no_grad():
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]


class _UNet(nn.Module):
    """A 3-D U-Net of two levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = _Block(2, width), _Block(width, 2 * width)
        self.up, self.last = nn.ConvTranspose3d(2 * width, width, 2, 2), _Block(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        up = self.up(self.down(F.max_pool3d(x, 2)))
        return self.head(self.last(torch.cat([up, x], 1)))


def test_a_network_on_volumes_stays_in_ndhwc() -> None:
    torch.manual_seed(0)
    model, x = _UNet(24).eval(), torch.randn(1, 2, 4, 6, 4)
    engine = compile(model, x, dtype="fp16", device="twin")
    expected = model(x).detach()
    torch.testing.assert_close(engine(x), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
    plan = engine.explain(x)
    assert not plan.fallbacks
    launched = [step.operation for step in plan.steps if step.rung]
    assert launched.count("conv3d") == 3, "BatchNorm is folded, and ReLU is part of the convolutions"
    assert launched[-3:] == ["conv2d", "convert", "convert"], (
        "the result is converted, to its layout and to fp32"
    )
    between = set(launched[launched.index("conv3d") : -3])
    assert between == {"conv3d", "max_pool2d", "conv2d", "volume_shuffle", "concatenate"}


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_a_step_of_a_network_on_volumes_has_kernels(dtype: str) -> None:
    torch.manual_seed(0)
    model = _UNet(16)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, expected))
    x, target = torch.randn(2, 2, 4, 6, 4), torch.randn(2, 3, 4, 6, 4)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype=dtype, device="twin")
    assert not step.plan.fallbacks
    close = {"tf32": 2e-3, "bf16": 1e-2}[dtype]
    for _ in range(2):
        # In fp32 for bf16 too: PyTorch's weight gradients of volumes in bf16 are garbage on some CPUs (2.13).
        loss = F.mse_loss(expected(x), target)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        torch.testing.assert_close(step(x, target), loss.detach(), rtol=close, atol=0)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=close, atol=close, msg=name)


class _Resampled(nn.Module):
    """Functions of volumes whose gradients are those of images: strides, pools, resizing and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv3d(16, 24, 3, 2, 1), nn.InstanceNorm3d(24, affine=True)
        self.groups, self.last = (
            nn.GroupNorm(4, 24),
            nn.Conv3d(24, 8, (2, 3, 3), padding=(0, 2, 1), dilation=(1, 2, 1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(self.norm(self.down(x)))
        x = F.avg_pool3d(self.groups(F.interpolate(x, scale_factor=2, mode="trilinear")), (2, 1, 2))
        return self.last(F.interpolate(x, scale_factor=(1, 2, 1), mode="nearest"))


def test_gradients_of_functions_of_volumes_are_those_of_images() -> None:
    torch.manual_seed(0)
    model = _Resampled()
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, expected))
    x = torch.randn(2, 16, 4, 6, 5)
    target = torch.randn_like(expected(x))
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype="tf32", device="twin")
    assert {one.node.op for one in step.plan.fallbacks} <= {"conv3d_input_gradient"}
    loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    torch.testing.assert_close(step(x, target), loss.detach(), rtol=1e-3, atol=0)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=5e-3, atol=5e-3, msg=name)


def test_volumes_that_no_kernel_computes_stay_in_ncdhw() -> None:
    """In fp32 and with groups PyTorch computes convolutions of volumes, in its own layout."""
    x = torch.randn(2, 16, 4, 5, 6)
    for model, dtype in ((nn.Conv3d(16, 16, 3), "fp32"), (nn.Conv3d(16, 16, 3, groups=4), "tf32")):
        model.eval()
        engine = compile(model, x, dtype=dtype, device="twin")
        (step,) = engine.explain(x).steps
        assert step.rung == "PyTorch"
        torch.testing.assert_close(engine(x), model(x))
