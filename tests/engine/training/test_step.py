"""Training steps beside PyTorch's: losses, parameters, buffers and optimizer state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.explain import explain_plan
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.lowering import Forms
from escalade.engine.passes.estimates import Estimates
from escalade.engine.plan import kernels
from escalade.errors import EscaladeError, UnsupportedError
from escalade.ops.layer_norm import LayerNormProblem
from escalade.ops.layer_norm_backward import LayerNormBackwardProblem
from escalade.ops.softmax_backward import SoftmaxBackwardProblem

Make = Callable[[], nn.Module]


def _autoencoder() -> nn.Module:
    def layer(inputs: int, outputs: int, resize: nn.Module) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), resize]

    return nn.Sequential(
        *layer(3, 8, nn.MaxPool2d(2)),
        *layer(8, 8, nn.Upsample(scale_factor=2)),
        nn.Conv2d(8, 3, 3, padding=1),
    )


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.inner, self.inner_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 1, 1)
        y = F.relu(y + self.inner_norm(self.inner(y)))
        return self.head(y.mean((2, 3)))


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 5))


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _batch(model: nn.Module, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(size, 3, 8, 8)
    return x, x.clone() if isinstance(model, nn.Sequential) and len(model) > 4 else torch.randint(
        0, 5, (size,)
    )


def _plain(
    model: nn.Module, loss: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, *batch: Any
) -> torch.Tensor:
    optimizer.zero_grad()
    found = loss(model(batch[0]), *batch[1:])
    found.backward()
    optimizer.step()
    return found.detach()


def _assert_same(mine: Any, theirs: Any, close: float = 1e-5) -> None:
    torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("make", "loss", "optimiser"),
    [
        (_autoencoder, F.mse_loss, _adamw),
        (_Residual, F.cross_entropy, _sgd),
        (_classifier, F.cross_entropy, _sgd),
    ],
)
def test_steps_are_pytorchs(make: Make, loss: Callable[..., torch.Tensor], optimiser: Any) -> None:
    torch.manual_seed(0)
    model = make()
    expected = copy.deepcopy(model)
    own, theirs = optimiser(model.parameters()), optimiser(expected.parameters())
    x, target = _batch(model)
    before = copy.deepcopy(model.state_dict())
    step = escalade.training_step(model, loss, own, (x, target))
    _assert_same(model.state_dict(), before, 0)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (own, theirs)]
    programs: dict[int, Any] = {4: step.program}
    for size in (4, 4, 2, 4):
        x, target = _batch(model, size)
        _assert_same(step(x, target), _plain(expected, loss, theirs, x, target))
        model.eval()  # as for an evaluation between steps
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of schedules without a step of their optimizer
            for schedule in schedules:
                schedule.step()
        assert programs.setdefault(size, step.program) is step.program
    _assert_same(model.state_dict(), expected.state_dict())
    _assert_same(own.state_dict()["state"], theirs.state_dict()["state"])

    # Steps by the optimizer itself, and loaded states, are taken over.
    _plain(model.train(), loss, own, x, target)
    _plain(expected, loss, theirs, x, target)
    own.load_state_dict(copy.deepcopy(theirs.state_dict()))
    _assert_same(step(x, target), _plain(expected, loss, theirs, x, target))
    _assert_same(model.state_dict(), expected.state_dict())


def test_a_resumed_run_continues_like_the_first() -> None:
    torch.manual_seed(0)
    model = _classifier()
    batches = [_batch(model) for _ in range(4)]
    optimizer = _adamw(model.parameters())
    step = escalade.training_step(model, F.cross_entropy, optimizer, batches[0])
    for batch in batches[:2]:
        step(*batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = [step(*batch) for batch in batches[2:]]

    again = _classifier()
    fresh = _adamw(again.parameters())
    resumed = escalade.training_step(again, F.cross_entropy, fresh, batches[0])
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    assert [float(resumed(*batch)) for batch in batches[2:]] == [float(loss) for loss in losses]
    _assert_same(again.state_dict(), model.state_dict(), 0)


def test_a_failing_call_changes_nothing() -> None:
    model = _classifier()
    optimizer = _sgd(model.parameters())
    x, target = _batch(model)
    step = escalade.training_step(model, F.cross_entropy, optimizer, (x, target))
    step(x, target)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for wrong in ((x[:, :, :4], target), (x, target.float()), (x,), (x, "target"), ()):
        with pytest.raises(EscaladeError):
            step(*wrong)
    with pytest.raises(EscaladeError):
        step(x, target + 100)
    _assert_same((model.state_dict(), optimizer.state_dict()), before, 0)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_scaled_step_with_infinite_gradients_is_left_out(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = copy.deepcopy(model.state_dict())
    parts = [{"params": part.parameters()} for part in model] if groups == 2 else model.parameters()
    optimizer = torch.optim.SGD(parts, lr=0.1, momentum=0.9)
    x, target = torch.rand(4, 3), torch.rand(4, 3)
    step = escalade.training_step(model, F.mse_loss, optimizer, (x, target), loss_scale=8.0)
    assert not step(x, torch.full((4, 3), float("inf"))).isfinite()
    _assert_same(model.state_dict(), before, 0)
    assert step.loss_scale == 4.0
    saved = step.state_dict()
    step.load_state_dict({**saved, "scale": 2.0})
    assert step.loss_scale == 2.0
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    expected.load_state_dict(before)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    _assert_same(step(x, target), _plain(expected, F.mse_loss, theirs, x, target))
    _assert_same(model.state_dict(), expected.state_dict())


def test_mixed_steps_are_autocasts_and_dropout_draws_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 5)
    )
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x, target = torch.rand(4, 3, 8, 8), torch.randint(0, 5, (4,))
    step = escalade.training_step(model, F.cross_entropy, own, (x, target), dtype="bf16")
    for seed in range(2):
        torch.manual_seed(seed)
        found = step(x, target)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(expected(x), target)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        _assert_same(found, loss.detach(), 2e-2)
    assert all(one.dtype == torch.float32 for one in model.parameters())
    _assert_same(model.state_dict(), expected.state_dict(), 2e-2)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_kernels_step_as_pytorch_does(order: torch.memory_format) -> None:
    """On the twin, in mixed precision, over weights in both layouts."""
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 2, bias=False).to(memory_format=order)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1, 0.9) for one in (model, expected))
    x, target = torch.rand(2, 8, 4, 4), torch.rand(2, 8, 3, 3)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype="fp16", device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.mse_loss, theirs, x, target), 1e-2)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-3)
    assert len(step.plan.fallbacks) < len(step.plan.steps) / 2


class _Separable(nn.Module):
    """Depthwise and grouped convolutions, also strided, and functions other than ReLU after normalizations."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
        functions = (nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.LeakyReLU(0.1), nn.GELU())
        windows = ((3, 1, 16), (5, 2, 16), (3, 1, 4), (3, 2, 2))
        for function, (size, stride, groups) in zip(functions, windows, strict=False):
            layers += [nn.BatchNorm2d(16), function]
            layers += [nn.Conv2d(16, 16, size, stride, size // 2, groups=groups, bias=groups == 16)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(16), functions[-1])
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def test_kernels_have_all_gradients_of_separable_convolutions() -> None:
    torch.manual_seed(0)
    model = _Separable().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    x, target = (
        torch.randn(3, 3, 12, 9).contiguous(memory_format=torch.channels_last),
        torch.tensor([0, 1, 4]),
    )
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    step = escalade.training_step(model, F.cross_entropy, own, (x, target), device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.cross_entropy, theirs, x, target), 1e-4)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-4)
    steps = [one.node.op for one in step.plan.steps if one.runs]
    assert steps.count("batch_norm_backward") == steps.count("batch_norm_training") == 5
    assert steps.count("pointwise") + steps.count("relu") <= 2, (
        "but for the last, functions are the normalisations'"
    )
    in_pytorch = {one.node.op for one in step.plan.steps if one.runs and one.in_pytorch}
    assert not any(op.startswith("conv2d") for op in in_pytorch), "of any number of groups"


class _Patches(nn.Module):
    """Windows side by side, of more pixels than phases, behind a layer whose filters the model scales by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.scale = (
            nn.Parameter(torch.randn(2, 6, 3, 3, 3) / 9),
            nn.Parameter(torch.rand(1, 1, 3, 1, 1)),
        )
        self.patches = nn.Conv2d(12, 7, 5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filters = (self.filters * self.scale).flatten(0, 1)
        return self.patches(F.conv2d(x, filters, padding=1)).flatten(1)


def test_kernels_have_all_gradients_of_patches_and_of_scaled_filters() -> None:
    torch.manual_seed(0)
    model = _Patches()
    expected = copy.deepcopy(model)
    x, target = torch.randn(3, 3, 10, 15), torch.tensor([0, 1, 41])
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    step = escalade.training_step(model, F.cross_entropy, own, (x, target), device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.cross_entropy, theirs, x, target), 1e-4)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-4)
    in_pytorch = {one.node.op for one in step.plan.steps if one.runs and one.in_pytorch}
    assert not [op for op in in_pytorch if op.startswith("conv2d") or op == "reduce"]


class _Maxima(nn.Module):
    """Largest elements of images, of groups of channels and of windows; and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slopes, self.second = nn.Conv2d(3, 8, 3), nn.PReLU(), nn.Conv2d(4, 6, 1)
        self.windows, self.image = nn.AdaptiveMaxPool2d((4, 3)), nn.AdaptiveMaxPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slopes(self.first(x))
        x = torch.stack([x, x.detach()], 1).amax(1)  # of equal elements each has a share of the gradient
        scale = x.amax((2, 3)).unflatten(1, (2, 4)).sum(1)
        x = F.logsigmoid(x.unflatten(1, (2, 4)).amax(1)) * scale[..., None, None]
        x = F.glu(self.second(self.windows(x)), 1)
        return torch.cat([self.image(x).flatten(1), x.amax((1, 2, 3), keepdim=True).flatten(1)], 1)


@pytest.mark.share(7)
@pytest.mark.parametrize("backend", [False, True])
def test_kernels_have_the_gradients_of_maxima_and_gates(backend: bool) -> None:
    torch.manual_seed(0)
    model = _Maxima().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    x, target = torch.randn(3, 3, 10, 8), torch.tensor([0, 1, 3])
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    if backend:
        compiled: Any = torch.compile(model, backend="escalade")
        step: Any = lambda x, target: _plain(compiled, F.cross_entropy, own, x, target)  # noqa: E731
    else:
        step = escalade.training_step(model, F.cross_entropy, own, (x, target), device="twin")
        assert not [one.node.attributes["target"] for one in step.plan.fallbacks if one.node.op == "aten"]
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.cross_entropy, theirs, x, target), 1e-4)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-4)


class _Graph:
    """Replacement for a CUDA graph: repeat the recorded work."""

    def __init__(self, record: Callable[[], Any], side: Any) -> None:
        self.replay = record


class _Rows(nn.Module):
    """A convolution whose pixels are compared with those of a buffer, and read by another convolution."""

    target: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.register_buffer("target", torch.randn(4, 6, 7, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.first(x).permute(0, 2, 3, 1)
        return self.second(rows.permute(0, 3, 1, 2)), F.mse_loss(rows, self.target)


def test_further_results_have_the_layout_of_the_first() -> None:
    """One kernel computes the terms of a loss and a sum of gradients, for values that PyTorch holds in rows."""
    torch.manual_seed(0)
    model = _Rows()
    expected, x, target = copy.deepcopy(model), torch.randn(4, 3, 6, 7), torch.randn(4, 3, 6, 7)

    def loss(y: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y[0], target) + y[1]

    own, theirs = (_sgd(one.parameters()) for one in (model, expected))
    step = escalade.training_step(model, loss, own, (x, target), device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, loss, theirs, x, target), 1e-5)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-5)


@pytest.mark.parametrize("device", [None, "twin"])
def test_processes_meet_between_gradients_and_optimiser(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1, 0.9) for one in (model, expected))
    x, target = torch.rand(2, 8, 4, 4), torch.rand(2, 8, 3, 3)
    met: list[torch.Size] = []

    def reduce(gradients: torch.Tensor) -> None:  # like another process whose gradients are zeros
        met.append(gradients.shape)
        gradients /= 2

    step = escalade.training_step(
        model, F.mse_loss, own, (x, target), dtype="fp16" if device else "fp32", device=device, reduce=reduce
    )
    monkeypatch.setattr(kernels, "CapturedGraph", _Graph)
    for number in range(3):
        if number == 2:  # as on a GPU: one graph before the all-reduce and one after it
            monkeypatch.setattr(step.program, "_capture_stream", "a stream", raising=False)
        loss = step(x, target)
        _assert_same(loss, _plain(expected, lambda y, t: F.mse_loss(y, t) / 2, theirs, x, target) * 2, 1e-2)
        assert met == [(256,)] * (number + 1)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-3 if device else 1e-5)


def test_unsupported_training_steps_are_reported() -> None:
    model, x, target = _classifier(), *_batch(_classifier())
    optimizer = _sgd(model.parameters())
    with pytest.raises(UnsupportedError, match="fp32, tf32, fp16, bf16"):
        escalade.training_step(model, F.cross_entropy, optimizer, (x, target), dtype="fp8")
    half = copy.deepcopy(model).half()
    with pytest.raises(UnsupportedError, match="need torch.float32 parameters"):
        escalade.training_step(half, F.cross_entropy, _sgd(half.parameters()), (x, target))
    with pytest.raises(UnsupportedError, match=r"model\.train\(\)"):
        escalade.training_step(model.eval(), F.cross_entropy, optimizer, (x, target))


class _Absorbing(nn.Module):
    """A cast fused into the next function, and layers that read constants of a batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1, groups=4)
        self.joint = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.zeros(x.shape[0], 4, 3, 3).bool().logical_not().cumsum(1, dtype=torch.float32)
        joint = self.joint(torch.cat([x, positions], 1))
        return self.conv(positions) + F.silu((x.half() * 2).float()) + joint


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_absorbed_casts_and_folded_constants(device: str) -> None:
    torch.manual_seed(0)
    model = _Absorbing()
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x, target = torch.rand(2, 4, 3, 3), torch.rand(2, 4, 3, 3)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), device=device)
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.mse_loss, theirs, x, target), 1e-6)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 4)])
def test_statistics_of_mixed_norms_are_fp32(norm: nn.Module) -> None:
    """A bias that the norm cancels has a gradient of pure rounding errors, which rounded statistics multiply."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), copy.deepcopy(norm))
    nn.init.uniform_(model[1].get_parameter("weight"), 0.5, 1.5)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected))
    x, target = torch.rand(4, 4, 8), torch.rand(4, 4, 8)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype="bf16")
    step(x, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    _assert_same(model[0].state_dict(), expected[0].state_dict(), 2e-5)
    # PyTorch's CPU kernel rounds its sums for the norm's parameters to bf16.
    _assert_same(model[1].state_dict(), expected[1].state_dict(), 1e-3)


class _WideNorm(nn.LayerNorm):
    """Norm in fp32 between casts, as under CUDA's autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float()).to(x.dtype)


class _Norms(nn.Module):
    """Norms of images' channels, without parameters, and of several dimensions, each after a linear layer."""

    def __init__(self, kind: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            (kind(16), kind(16, bias=False), kind(16, elementwise_affine=False), kind((4, 16)))
        )
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in self.norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = norm(layer(x))
        return x


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(nn.LayerNorm, "fp32"), (nn.LayerNorm, "bf16"), (_WideNorm, "bf16")]
)
def test_kernels_have_all_gradients_of_layer_norms(kind: type[nn.LayerNorm], dtype: str) -> None:
    torch.manual_seed(0)
    model = _Norms(kind)
    for parameter in model.norms.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected))
    x, target = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 4, 16)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype=dtype, device="twin")
    found = step(x, target)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    _assert_same(found, loss.detach(), tolerance)
    _assert_same(model.state_dict(), expected.state_dict(), tolerance)
    steps = [one for one in step.plan.steps if one.runs]
    for name in ("layer_norm", "layer_norm_backward"):
        assert sum(one.node.op == name and not one.in_pytorch for one in steps) == len(model.norms), name
    assert not any("layer_norm" in one.node.attributes.get("target", "") for one in steps)
    narrow = [one for one in steps if one.node.op.startswith("layer_norm") and one.node.dtype == "bfloat16"]
    assert len(narrow) >= (0 if dtype == "fp32" else 5), "casts around norms remain, except the loss's"


class _GroupNorms(nn.Module):
    """Norms of groups of channels between convolutions of images, and one of sequences without parameters.

    If wide, they and the functions behind them are in fp32, as under CUDA's autocast.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.first, self.second = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(24, 12, 3, padding=1)
        self.norms = nn.ModuleList(
            (nn.GroupNorm(4, 24), nn.GroupNorm(3, 12), nn.GroupNorm(12, 12, affine=False))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(0, self.first(x)))
        x = F.relu(self.norm(1, self.second(x)))
        return torch.sin(self.norm(2, x.flatten(2))).view(x.shape)

    def norm(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if not self.wide:
            return self.norms[index](x)
        with torch.autocast("cpu", enabled=False):
            return self.norms[index](x.float())


class _InstanceNorms(nn.Module):
    """Norms of single channels of images, with and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 12, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("kind", "dtype", "norms"),
    [
        (partial(_GroupNorms, False), "fp32", 3),
        (partial(_GroupNorms, False), "bf16", 3),
        (partial(_GroupNorms, True), "bf16", 3),
        (_InstanceNorms, "fp32", 2),
        (_InstanceNorms, "bf16", 2),
    ],
)
def test_kernels_have_all_gradients_of_group_norms(
    kind: Callable[[], nn.Module], dtype: str, norms: int
) -> None:
    torch.manual_seed(0)
    model = kind()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 0.05) for each in (model, expected))
    x, target = torch.randn(3, 4, 6, 5), torch.randn(3, 12, 6, 5)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype=dtype, device="twin")
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for _ in range(3):
        found = step(x, target)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.mse_loss(expected(x), target)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        _assert_same(found, loss.detach(), tolerance)
    _assert_same(model.state_dict(), expected.state_dict(), tolerance)
    steps = [one for one in step.plan.steps if one.runs]
    assert sum(one.node.op == "group_norm" and not one.in_pytorch for one in steps) == norms
    gradients = [one for one in steps if one.node.op == "group_norm_backward" and not one.in_pytorch]
    assert len(gradients) == norms and all(one.node.attributes["function"] for one in gradients)
    assert not any("norm" in one.node.attributes.get("target", "") for one in steps)
    if kind is _InstanceNorms:  # no view of a batch as one image, which needs NCHW
        assert all(
            one.node.shape == (3, 8, 6, 5) and one.lowered.problem.layout == "nhwc"
            for one in gradients
            if one.lowered
        )


class _Shuffled(nn.Module):
    """One half of the channels passes a convolution; a shuffle written with views mixes the halves again."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            kept, read = x.chunk(2, 1)
            batch, channels, *sides = x.shape
            joined = torch.cat((kept, F.relu(conv(read))), 1)
            x = joined.view(batch, 2, channels // 2, *sides).transpose(1, 2).reshape(x.shape)
        return x


def test_shuffles_and_their_gradients_are_one_kernel_each() -> None:
    torch.manual_seed(0)
    model = _Shuffled()
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x, target = torch.randn(2, 16, 7, 9), torch.randn(2, 16, 7, 9)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.mse_loss, theirs, x, target), 1e-4)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-4)
    ran = [one.node.op for one in step.plan.steps if one.runs]
    assert ran.count("shuffle") == 4
    assert not {"permute", "reshape"} & set(ran)


class _Softmaxes(nn.Module):
    """Softmax over rows, over the channels of images, over an inner dimension, and logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.conv = nn.Conv2d(3, 5, 3)
        self.table = nn.Parameter(torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.layers[0](torch.softmax(self.layers[1](x) + self.table, -1))
        channels = torch.softmax(self.conv(rows), 1)
        inner = channels.flatten(2, 3).unflatten(1, (1, 5)).softmax(2).sum((1, 2))
        rows, channels = channels.flatten(1).log_softmax(-1), channels.log_softmax(1)
        logs = rows.sigmoid().mean(1) + channels.square().mean((1, 2, 3))
        return inner.square().mean(1) + logs


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_have_the_gradients_of_softmax(dtype: str) -> None:
    torch.manual_seed(0)
    model = _Softmaxes()
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 1.0) for each in (model, expected))
    x, target = torch.randn(3, 3, 7, 12), torch.randn(3)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype=dtype, device="twin")
    found = step(x, target)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    _assert_same(found, loss.detach(), tolerance)
    _assert_same(model.state_dict(), expected.state_dict(), tolerance)
    steps = [one for one in step.plan.steps if one.runs]
    assert not any("softmax" in one.node.attributes.get("target", "") for one in steps)
    gradients = [one for one in steps if one.node.op == "softmax_backward"]
    assert not any(one.in_pytorch for one in gradients)
    lowered = [one.lowered for one in gradients if one.lowered is not None]
    problems = [one.problem for one in lowered if isinstance(one.problem, SoftmaxBackwardProblem)]
    assert [one.in_place for one in lowered] == [
        "gradient" if one.read == one.result else None for one in problems
    ]
    types = {(one.read, one.dtype, one.result) for one in problems if one.classes == 12}
    assert types == {("fp32" if dtype == "fp32" else "bf16", "fp32", "fp32")}
    sizes = sorted((one.classes, one.inner, one.log) for one in problems)
    assert sizes == [(5, 1, False), (5, 1, True), (5, 50, False), (12, 1, False), (250, 1, True)]


class _Stream(nn.Module):
    """Norms of a residual stream in fp32 between layers in 16 bits, as in transformers; and one of a layer's result,
    whose own result is needed in both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.places = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (first, second, third), layers = self.norms, self.layers
        x = x + self.places
        x = x + layers[0](first(x))
        x = x + layers[1](second(x).transpose(0, 1)).transpose(0, 1)
        y = third(layers[2](x).float())
        return x + y * layers[3](y)


def test_kernels_of_norms_cast_what_autocast_casts() -> None:
    torch.manual_seed(0)
    model = _Stream()
    for parameter in model.norms.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected))
    x, target = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype="bf16", device="twin")
    found = step(x, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    _assert_same(found, loss.detach(), 1e-2)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-2)
    problems = [one.lowered.problem for one in step.plan.steps if one.lowered is not None]
    norms = [one for one in problems if isinstance(one, LayerNormProblem)]
    assert [(one.dtype, one.result) for one in norms] == [("fp32", "bf16")] * 2 + [("bf16", "fp32")]
    gradients = [one for one in problems if isinstance(one, LayerNormBackwardProblem)]
    types = [(one.read, one.dtype, one.result, one.residual, one.rounded) for one in gradients]
    behind_blocks = [("bf16", "fp32", "fp32", "fp32", "bf16"), ("bf16", "fp32", "fp32", "fp32", "")]
    assert types == [("fp32", "bf16", "bf16", "", ""), *behind_blocks]


class _Block(nn.Module):
    """Attention by PyTorch's module, and parts of values by every operator."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.norms = nn.Linear(16, 16), nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.projection, self.head = nn.Linear(16, 48), nn.Linear(16, 5)
        self.position = nn.Parameter(torch.randn(7, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.position
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.layers(self.norms[1](x))
        first, second = self.norms[2](x).chunk(2, -1)
        q, k, v = self.projection(torch.cat([first * second, second], -1)).unflatten(-1, (3, 16)).unbind(-2)
        a, b = (q * k).split((6, 10), -1)
        y = torch.cat([b[..., :4] * v[..., 12:], a, b[..., 4:]], -1) + v
        return self.head(y[:, 0] + y[:, 1:].mean(1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_have_all_gradients_of_attention_and_parts(dtype: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = _Block(batch_first)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected))
    x, target = torch.randn(4, 7, 16), torch.randint(0, 5, (4,))
    step = escalade.training_step(model, F.cross_entropy, own, (x, target), dtype=dtype, device="twin")
    found = step(x, target)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        loss = F.cross_entropy(expected(x), target)
    loss.backward()
    theirs.step()
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    _assert_same(found, loss.detach(), tolerance)
    _assert_same(model.state_dict(), expected.state_dict(), tolerance)
    padded = [one for one in step.plan.steps if one.node.calls in ("select_backward", "slice_backward")]
    assert len(padded) <= 1, padded
    # The residual stream is fp32 and products are not: their sums have kernels.
    assert not any(one.in_pytorch and one.node.op == "add" for one in step.plan.steps)


class _Sequences(nn.Module):
    """Convolutions of sequences of every kind, normed weights, BatchNorm in 2, 3 and 5 dimensions, and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.BatchNorm3d(4)
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 16, 5, padding=4, dilation=2))
        self.strided = nn.Conv1d(16, 16, 3, 2, 1, groups=16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Conv1d(16, 8, 1)
        self.larger = nn.ConvTranspose1d(8, 8, 4, 2, 1)
        self.slopes, self.rows, self.head = nn.PReLU(8), nn.BatchNorm1d(8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frames(torch.tanh(self.first(x)).unflatten(1, (4, 2, 2))).flatten(1, 3)
        x = torch.relu(self.norm(self.strided(x)))
        return self.head(self.rows(self.slopes(self.larger(self.last(x))).mean(-1)))


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_on_sequences_rows_and_volumes_have_kernels(dtype: str) -> None:
    torch.manual_seed(0)
    model = _Sequences()
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x, target = torch.randn(4, 6, 21), torch.tensor([0, 1, 5, 2])
    step = escalade.training_step(model, F.cross_entropy, own, (x, target), dtype=dtype, device="twin")
    close = 1e-4 if dtype == "fp32" else 6e-2
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = _plain(expected, F.cross_entropy, theirs, x, target)
        _assert_same(step(x, target), loss, close)
    _assert_same(model.state_dict(), expected.state_dict(), close)
    targets = {str(one.node.attributes.get("target", one.node.op)) for one in step.plan.fallbacks}
    assert not [name for name in targets if "conv" in name or "norm" in name or "prelu" in name]
    moved = [one.node.name for one in step.plan.steps if one.node.op == "convert" and one.node.shape[0] == 4]
    assert len(moved) <= 16, "functions between layers on sequences keep channels innermost"
    if dtype == "bf16":
        assert not [name for name in targets if "mm" in name], "rows of 7 classes are 14 bytes"


class _Transposed(nn.Module):
    """Transposed convolutions of every kind, each after an activation, on images that grow and shrink again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((
            nn.ConvTranspose2d(8, 16, 2, 2),
            nn.ConvTranspose2d(16, 8, 3, 1, 1, bias=False),
            nn.ConvTranspose2d(8, 8, 3, 2, 1, 1),
            nn.ConvTranspose2d(8, 16, 3, 2, 1, groups=2),
            nn.ConvTranspose2d(16, 16, 3, 2, 1, groups=16),
            nn.ConvTranspose2d(16, 8, 2, 1, 1, output_padding=1, dilation=2),  # not a gradient of a convolution
        ))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.avg_pool2d(torch.tanh(layer(x)), 2)
        return x


def test_kernels_have_all_gradients_of_transposed_convolutions() -> None:
    torch.manual_seed(0)
    model = _Transposed()
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x = torch.randn(2, 8, 9, 7)
    target = torch.randn(2, *expected(x).shape[1:])
    step = escalade.training_step(model, F.mse_loss, own, (x, target), device="twin")
    for _ in range(2):
        _assert_same(step(x, target), _plain(expected, F.mse_loss, theirs, x, target), 1e-4)
    _assert_same(model.state_dict(), expected.state_dict(), 1e-4)
    left = [one.node for one in step.plan.fallbacks]
    by_target = [
        one.attributes["target"] for one in left if "convolution" in one.attributes.get("target", "")
    ]
    assert by_target == ["aten::convolution"] + 3 * ["aten::convolution_backward"], "but for the last layer"
    # PyTorch computes grouped weight gradients, and the layer whose groups only a naive kernel supports.
    assert sum(one.op in ("conv2d", "conv_transpose2d", "conv2d_input_gradient") for one in left) <= 1


class _Bottleneck(nn.Module):
    """Normalizations after convolutions, with a ReLU and with a residual."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.narrow, self.narrow_norm = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.inner, self.inner_norm = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.wide, self.wide_norm = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.narrow_norm(self.narrow(x)))
        y = F.relu(self.inner_norm(self.inner(y)))
        return F.relu(self.wide_norm(self.wide(y)) + x)


def _normalized_network() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(8, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    model = nn.Sequential(
        *stem, _Bottleneck(64, 16), _Bottleneck(64, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5), nn.init.normal_(module.bias, std=0.2)
    return model


def test_sums_of_batch_norm_are_computed_by_the_convolutions_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward on the twin, whatever the estimates; compared with float32 and PyTorch's autocast."""

    def least_if_fused(self: Estimates, nodes: Iterable[Node], forms: Forms) -> float | None:
        nodes = list(nodes)
        total = real(self, nodes, forms)
        return 0.0 if total and {"norm", "epsilon"} & nodes[0].attributes.keys() else total

    real = Estimates.total_us
    monkeypatch.setattr(Estimates, "total_us", least_if_fused)
    model = _normalized_network()
    x, target = torch.randn(3, 8, 12, 12), torch.randn(3, 64)
    mine, mixed, exact = (copy.deepcopy(model) for _ in range(3))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (mine, mixed, exact)]
    step = escalade.training_step(mine, F.mse_loss, optimizers[0], (x, target), dtype="bf16", device="twin")
    names = [f"{each.operation} {each.problem}" for each in explain_plan(step.plan).steps]
    assert sum("eps1e-05+m0.1" in name for name in names) == 7
    for mask in ("normx", "normoutput"):
        assert any(name.startswith("conv2d_input_gradient") and name.endswith(mask) for name in names)
    for _ in range(2):
        step(x, target)
        with torch.autocast("cpu", torch.bfloat16):
            _plain(mixed, F.mse_loss, optimizers[1], x, target)
        _plain(exact, F.mse_loss, optimizers[2], x, target)
    for name, right in exact.state_dict().items():
        if right.is_floating_point():
            size = float(right.norm())
            own, theirs = (float((each.state_dict()[name] - right).norm()) / size for each in (mine, mixed))
            assert own <= 3 * theirs + 1e-3, name
