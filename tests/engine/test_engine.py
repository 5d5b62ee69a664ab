"""Engines on the CPU match their models, and report bad inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.engine import Engine, compile
from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import FusionLevel
from escalade.errors import UnsupportedError
from escalade.models.resnet import BasicBlock, Bottleneck, ResNet
from escalade.models.vgg import VGG
from tests import formulas
from tests.engine.untouched import untouched
from tests.support import in_threads

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}
ROUNDING = {"fp16": 1, "bf16": 8}
"""Coarseness of a dtype relative to fp16. PyTorch's reference runs in fp16: without bf16 instructions it is slow."""
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: ResNet(BasicBlock, (2, 2, 2, 2), 10), (3, 64, 64)),
    "resnet34": (lambda: ResNet(BasicBlock, (3, 1, 2, 1), 10), (3, 64, 64)),
    "resnet50": (lambda: ResNet(Bottleneck, (1, 1, 2, 1), 10), (3, 64, 64)),
    "vgg16_bn": (lambda: VGG(((8,), (16, 16)), 10, 3, 32, 2), (3, 16, 16)),
    "unet": (lambda: models.UNet(3, 2, 8, 2), (3, 16, 16)),
    "mobilenet_v2": (
        lambda: models.MobileNetV2(((1, 8, 1, 1), (6, 16, 2, 2)), 10, 3, 1.0, 16, 32),
        (3, 32, 32),
    ),
    "densenet121": (lambda: models.DenseNet((2, 2), 8, 16, 2, 10), (3, 32, 32)),
    "autoencoder": (models.ConvAutoencoder, (3, 16, 16)),
    "lenet": (models.LeNet, (1, 86, 86)),
    "spectral_autoencoder": (models.SpectralAutoencoder, (320,)),
}
"""Every named network, small where that is sufficient."""


@pytest.fixture(scope="module", params=models.NAMES)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[int, ...], Graph]:
    make, item = SMALL[request.param]
    torch.manual_seed(3)
    model = make()
    models.settle(model, torch.randn(8, *item))
    example = torch.randn(1, *item)
    with untouched(model, example):
        graph = capture(model, (example,))
    return model.eval(), item, graph


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_networks_match_pytorch(
    network: tuple[nn.Module, tuple[int, ...], Graph], dtype: str, seed: int
) -> None:
    """Within 1e-5 in fp32; in 16 bits at most twice PyTorch's own error in the same dtype."""
    model, item, graph = network
    engine = Engine(graph, dtype, "cpu")
    x = torch.randn(4, *item, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(x)
        allowed = TOLERANCE["fp32"]
        if dtype != "fp32":
            theirs = difference(copy.deepcopy(model).half()(x.half()), expected)
            allowed = 2 * theirs * ROUNDING[dtype]
    y = torch.cat([engine(x[:1]), engine(x[1:])])
    assert y.shape == expected.shape and y.dtype == expected.dtype and y.is_contiguous()
    assert difference(y, expected) <= allowed


def test_fusion_levels_differ_in_steps_and_agree_in_results() -> None:
    torch.manual_seed(4)
    model = ResNet(BasicBlock, (1, 1, 1, 1), 10)
    models.settle(model, torch.randn(8, 3, 64, 64))
    graph = capture(model, (torch.randn(1, 3, 64, 64),))
    x = torch.randn(2, 3, 64, 64)
    engines = [
        Engine(graph, "fp16", "cpu", fusion=fusion)
        for fusion in (FusionLevel.naive, FusionLevel.separate, FusionLevel.fused)
    ]
    naive, separate, fused = (len(engine.plan(x).steps) for engine in engines)
    assert naive == separate > 2 * fused
    for engine in engines:
        assert difference(engine(x), model(x).detach()) < TOLERANCE["fp16"]


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)
    ).eval()


@pytest.fixture(scope="module")
def engine(small: nn.Module) -> Engine:
    return compile(small, torch.randn(1, 3, 6, 6))


def test_images_come_in_any_type_and_layout(small: nn.Module, engine: Engine) -> None:
    x = torch.randn(2, 3, 6, 6)
    expected = small(x).detach()
    torch.testing.assert_close(engine(x.contiguous(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(
        engine(x.transpose(2, 3).contiguous().transpose(2, 3)), expected
    )  # neither layout
    torch.testing.assert_close(engine(x[:, :, ::1].expand(2, 3, 6, 6)), expected)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = x.to(dtype)
        torch.testing.assert_close(engine(rounded), small(rounded.float()).detach())


def test_bytes_are_normalised_on_the_way_in(small: nn.Module) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    x = torch.randint(0, 256, (2, 3, 6, 6), dtype=torch.uint8)
    shaped = (x.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = small(shaped).detach()
    for dtype in ("fp32", "fp16"):
        engine = compile(small, x, dtype=dtype, normalize=(mean, std))
        assert difference(engine(x), expected) < TOLERANCE[dtype]
        assert difference(engine(x.float()), expected) < TOLERANCE[dtype]
        assert (
            difference(engine(x.contiguous(memory_format=torch.channels_last)), expected) < TOLERANCE[dtype]
        )


@pytest.mark.parametrize("by_name", [True, False])
def test_bytes_are_normalised_however_they_are_given(by_name: bool) -> None:
    class Named(nn.Module):
        def forward(
            self, given: dict[str, torch.Tensor] | None = None, **named: torch.Tensor
        ) -> torch.Tensor:
            return (given or named)["image"].mean(1)

    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    arguments, keywords = ((), {"image": image}) if by_name else (({"image": image},), {})
    engine = compile(Named(), arguments, keywords, normalize=((0.5,) * 3, (0.25,) * 3))
    torch.testing.assert_close(engine(*arguments, **keywords), ((image / 255 - 0.5) / 0.25).mean(1))


def test_an_image_that_is_returned_is_normalised() -> None:
    """Also if nothing else reads it."""
    x = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    engine = compile(nn.Identity(), x, normalize=((0.5,) * 3, (0.2,) * 3))
    for given in (x, x.float()):
        torch.testing.assert_close(engine(given), (x.float() / 255 - 0.5) / 0.2)


def test_models_that_take_bytes_themselves_get_them() -> None:
    class Bytes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 200, x.float() / 255  # bytes wrap around

    x = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    for like in (x, x.contiguous(memory_format=torch.channels_last)):
        results = compile(Bytes(), like)(like)
        torch.testing.assert_close(results, Bytes()(like))


def test_integers_stay_exact(seed: int) -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randint(0, 50, (2, 4), generator=torch.Generator().manual_seed(seed))
    engine = compile(model, x)
    torch.testing.assert_close(engine(x), model(x).detach())
    with pytest.raises(UnsupportedError, match="is torch.int32; pass torch.int64"):
        engine(x.int())


def test_results_are_the_callers_own(engine: Engine) -> None:
    x, other = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6)
    y = engine(x)
    kept = y.clone()
    engine(other)
    torch.testing.assert_close(y, kept, rtol=0, atol=0)


def test_plans_are_kept_and_bounded(small: nn.Module) -> None:
    engine = compile(small, torch.randn(1, 3, 6, 6), plans=2)
    one = engine.plan(torch.randn(1, 3, 6, 6))
    assert engine.plan(torch.randn(1, 3, 6, 6)) is one  # kept
    engine.plan(torch.randn(2, 3, 6, 6))
    assert engine.plan(torch.randn(1, 3, 6, 6)) is one  # and used last
    engine.plan(torch.randn(3, 3, 6, 6))  # replaces 2
    assert len(engine._plans.cached) == 2
    assert engine.plan(torch.randn(1, 3, 6, 6)) is one
    with pytest.raises(UnsupportedError, match="at least 1"):
        compile(small, torch.randn(1, 3, 6, 6), plans=0)


def test_threads_share_an_engine(small: nn.Module) -> None:
    engine = compile(small, torch.randn(1, 3, 6, 6), plans=2)  # fewer than there are batch sizes
    inputs = [torch.randn(1 + number % 3, 3, 6, 6) for number in range(12)]
    expected = [small(x).detach() for x in inputs]

    def work(offset: int) -> None:
        for number in range(24):
            position = (number + offset) % len(inputs)
            torch.testing.assert_close(engine(inputs[position]), expected[position])

    in_threads(work)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, 6, 6), r"without the batch dimension of \[batch, 3, 6, 6\]"),
        (torch.randn(2, 3, 6, 6, dtype=torch.float64), "support float32, float16, bfloat16"),
        (torch.zeros(2, 3, 6, 6, dtype=torch.int32), "support float32, float16, bfloat16"),
        (torch.zeros(2, 3, 6, 6, dtype=torch.uint8), "normalize="),
        (torch.empty(2, 3, 6, 6, device="meta"), "is on meta, the engine runs on cpu; move it there"),
        (torch.zeros(2, 3, 6, 6).to_sparse(), "in layout sparse_coo; an engine takes dense tensors"),
        (torch._efficientzerotensor((2, 3, 6, 6)), "zeros without memory; an engine takes dense tensors"),
        ([torch.randn(2, 3, 6, 6)], "call the engine with input"),
        ("cat", "call the engine with"),
        (None, "call the engine with"),
    ],
)
def test_wrong_inputs_are_named(engine: Engine, x: object, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        engine(x)


def test_wrong_counts_are_named(engine: Engine) -> None:
    x = torch.randn(2, 3, 6, 6)
    with pytest.raises(UnsupportedError, match="call the engine with"):
        engine(x, x)
    with pytest.raises(UnsupportedError, match="call the engine with"):
        engine(image=x)
    with pytest.raises(UnsupportedError, match="2 tensors passed; the engine takes 1"):
        engine.program(x, x)


def test_wrong_options_are_named(small: nn.Module) -> None:
    x = torch.randn(1, 3, 6, 6)
    with pytest.raises(UnsupportedError, match="dtype 'int4': compile takes fp32, tf32, fp16, bf16"):
        compile(small, x, dtype="int4")
    for device in ("meta", "banana"):
        with pytest.raises(UnsupportedError, match=f"device '{device}': engines run on cuda, cpu or twin"):
            compile(small, x, device=device)
    for bad in (((0.5,) * 2, (0.5,) * 2), ((0.5,) * 3, (0.5, 0.5, 0.0))):
        with pytest.raises(UnsupportedError, match="3 finite means and 3 positive standard deviations"):
            compile(small, x, normalize=bad)
    with pytest.raises(UnsupportedError, match="one image input; this model has 0"):
        compile(nn.Linear(3, 3), torch.randn(1, 3), normalize=((0.5,) * 3, (0.5,) * 3))
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no GPU is available"):
            compile(small, x, device="cuda")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1, 2] = value
    with pytest.raises(UnsupportedError, match="weight holds values that are not finite"):
        compile(model, torch.randn(1, 4))


class Masked(nn.Module):
    """Causal rows, by a mask added before a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(8, 8)
        self.mask = nn.Buffer(torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        queries = self.queries(x)
        scores = queries @ x.transpose(1, 2) + self.mask
        return [scores.softmax(-1) @ x, F.scaled_dot_product_attention(queries, x, x, attn_mask=self.mask)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_masks_of_infinities_are_no_weights(dtype: str) -> None:
    model, x = Masked(), torch.randn(2, 5, 8)
    for found, expected in zip(compile(model, x, dtype=dtype)(x), model(x), strict=True):
        assert difference(found, expected.detach()) < TOLERANCE[dtype]


class Scaled(nn.Module):
    """Non-finite factors and terms, after a finite sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y, by = self.layer(x), torch.tensor([2.0, torch.inf, -torch.inf])
        return [y * torch.inf, y * by, y + by, y / 0]


def test_infinite_factors_and_terms_stay_behind_the_sum() -> None:
    model, x = Scaled(), torch.randn(2, 4)
    for found, expected in zip(compile(model, x)(x), model(x), strict=True):
        torch.testing.assert_close(found, expected.detach())


def test_weights_beyond_fp16_are_refused() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1, 2] = 1e6
    x = torch.randn(1, 4)
    with pytest.raises(
        UnsupportedError, match=r"weight has values beyond the range of fp16 \(largest 1e\+06\).*bf16"
    ):
        compile(model, x, dtype="fp16")
    for dtype in ("bf16", "fp32"):
        assert difference(compile(model, x, dtype=dtype)(x), model(x).detach()) < TOLERANCE[dtype]


def test_folding_beyond_fp16_range_is_skipped() -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3)).eval()
    model[1].running_var.fill_(1e-9)  # type: ignore[operator]
    with torch.no_grad():
        model[0].weight.mul_(1e3)  # type: ignore[operator]
    x = torch.randn(2, 4, 5, 5) * 1e-4
    assert difference(compile(model, x, dtype="fp16")(x), model(x).detach()) < TOLERANCE["fp16"]


def test_statistics_are_kept_in_fp32() -> None:
    """A variance of 1e8 exceeds fp16, its root does not."""
    model = nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(3), nn.ReLU()).eval()
    model[1].running_var.fill_(1e8)  # type: ignore[operator]
    model[1].running_mean.fill_(1e3)  # type: ignore[operator]
    x = 1e4 * torch.randn(2, 3, 8, 8)
    assert difference(compile(model, x, dtype="fp16")(x), model(x).detach()) < TOLERANCE["fp16"]


def test_nan_and_infinity_travel(engine: Engine, small: nn.Module) -> None:
    x = torch.randn(3, 3, 6, 6)
    x[0, 1, 2, 3], x[1, 0, 0, 0] = float("nan"), float("inf")
    convolution, dense = small[0], small[3]  # type: ignore[index]
    with torch.no_grad():
        y = formulas.convolution(x, convolution.weight, convolution.bias, padding=(1, 1))
        expected = formulas.product(formulas.relu(y).flatten(1), dense.weight, dense.bias).float()
    assert expected[0].isnan().all() and not expected[1].isfinite().any() and expected[2].isfinite().all()
    torch.testing.assert_close(engine(x), expected, equal_nan=True)


def test_half_models_and_models_of_no_weights() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).half().eval()
    x = torch.randn(2, 3, 6, 6).half()
    for dtype in ("fp16", "fp32"):
        y = compile(model, x, dtype=dtype)(x)
        assert y.dtype == torch.float16 and difference(y, model.float()(x.float()).detach()) < 2e-3
        model.half()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(compile(nn.MaxPool2d(2), x)(x), F.max_pool2d(x, 2))
    torch.testing.assert_close(compile(nn.Identity(), x)(x), x)


@torch.no_grad()
@pytest.mark.parametrize("order", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize(
    "first", (nn.Identity(), nn.Sigmoid(), nn.MaxPool2d(1)), ids=lambda m: type(m).__name__
)
def test_pixels_of_an_image_that_is_flattened_as_it_comes(
    first: nn.Module, order: torch.memory_format
) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(24, 5))
    x = torch.randn(2, 3, 4, 2).contiguous(memory_format=order)
    torch.testing.assert_close(compile(model, x, device="twin")(x), model(x), rtol=1e-4, atol=1e-5)


class Given(nn.Module):
    """Returns a buffer, a number and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return self.kept, 5, x


@pytest.mark.parametrize(
    "model", (nn.Identity(), nn.Flatten(), Given()), ids=lambda model: type(model).__name__
)
@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_models_that_compute_nothing(model: nn.Module, dtype: str) -> None:
    x = torch.arange(24.0).view(2, 3, 2, 2)
    result = compile(model, x, dtype=dtype, device="twin")(x)
    torch.testing.assert_close(result, model(x))
