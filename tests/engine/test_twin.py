"""Whole networks by kernels on the twin, compared with PyTorch's operators on the same plan."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.device import run
from escalade.engine import compile
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.plan import kernels
from escalade.engine.plan import program as programs
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import CompileError
from escalade.models.resnet import BasicBlock, ResNet
from escalade.ops.relu import ReluOperation

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: ResNet(BasicBlock, (1, 1, 1, 1), 10), (3, 32, 32)),  # stem, pool, shortcuts
    "lenet": (models.LeNet, (1, 86, 86)),
    "mobilenet": (lambda: models.MobileNetV2(((1, 8, 1, 1), (6, 16, 2, 2)), 10, 3, 1.0, 16, 32), (3, 16, 16)),
    "densenet": (lambda: models.DenseNet((2, 2), 8, 16, 2, 10), (3, 32, 32)),
    "unet": (lambda: models.UNet(3, 2, 8, 2), (3, 16, 16)),
}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, ("fp16", "fp32")[number % 2]) for number, name in enumerate(NETWORKS)]
)
def test_kernels_match_the_plan(name: str, dtype: str) -> None:
    make, item = NETWORKS[name]
    torch.manual_seed(10)
    model = make()
    models.settle(model, torch.randn(8, *item))
    graph = capture(model.eval(), (torch.randn(1, *item),))
    twin, cpu = Engine(graph, dtype, "twin"), Engine(graph, dtype, "cpu")
    x = torch.randn(2, *item)
    program = twin.program(x)
    assert isinstance(program, KernelProgram)
    program._values.arena.fill_(0xFF)  # NaN in every floating type: no unwritten memory is read
    y = twin(x)
    with torch.no_grad():
        assert difference(y, model(x)) <= TOLERANCE[dtype]
    assert difference(y, cpu(x)) <= TOLERANCE[dtype]
    if dtype == "fp16":
        torch.testing.assert_close(twin(x), y, rtol=0, atol=0)  # leftovers of a run do not matter


class Head(nn.Module):
    """The end of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 72, 3, padding=1)
        self.fc = nn.Linear(72, 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.adaptive_avg_pool2d(F.relu(self.conv(x)), 1).flatten(1))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_launch_for_mean_and_layer_matches_two(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(14)
    graph = capture(Head().eval(), (torch.randn(1, 3, 7, 7),))
    x = torch.randn(2, 3, 7, 7)
    together, apart = Engine(graph, dtype, "twin"), Engine(graph, dtype, "twin")
    rungs = [step.rung for step in together.explain(x).steps]
    rule = sys.modules["escalade.engine.passes.fuse_pools"]
    monkeypatch.setattr(rule, "one_launch_pays", lambda problem: False)
    assert len(apart.explain(x).steps) == len(rungs) + 2  # the mean, and the flattening
    assert rungs[-1] == "pooled"
    error = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}[dtype]
    torch.testing.assert_close(together(x), apart(x), rtol=error, atol=error)


class Awkward(nn.Module):
    """Orders, dtypes and shapes that kernels and PyTorch's operators treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 7, 3, padding=1)
        self.mix = nn.Linear(7, 6)
        self.rows = nn.Linear(6 * 4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.conv(x))
        pixels = self.mix(y.permute(0, 2, 3, 1)) + torch.linspace(0, 1, 6)
        flat = pixels.permute(0, 3, 1, 2).flatten(2)  # PyTorch's layout
        rows = self.norm(self.rows(flat[:, :, :4].flatten(1)))
        gathered = torch.gather(y.flatten(2), 2, ids.flatten(2))
        return {
            "y": y,
            "rows": F.relu(rows + row),
            "flat": flat,
            "gathered": gathered,
            "most": y.argmax(1),
            "back": F.relu(gathered.view(-1, 7, 2, 2) * 2),
            "soft": torch.softmax(rows, -1),
        }


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_orders_and_types_between_kernels_and_pytorch(dtype: str) -> None:
    torch.manual_seed(11)
    model = Awkward().eval()
    x, row = torch.randn(2, 5, 6, 4), torch.randn(2, 3)
    ids = torch.randint(0, 24, (2, 7, 2, 2)).contiguous(memory_format=torch.channels_last)
    graph = capture(model, (x, ids, row))
    twin = Engine(graph, dtype, "twin")
    for each in (x, x.contiguous(memory_format=torch.channels_last), x.bfloat16()):
        with torch.no_grad():
            expected = model(each.float(), ids, row)
        results = twin(each, ids, row)
        assert list(results) == list(expected)
        for name, found in results.items():
            assert found.shape == expected[name].shape and found.dtype == expected[name].dtype
            if name != "most":
                assert difference(found, expected[name]) <= TOLERANCE[dtype], name
    if dtype == "fp32":
        assert torch.equal(twin(x, ids, row)["most"], model(x, ids, row)["most"])


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_pytorchs_operators_have_the_plans_precision(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default PyTorch uses TF32 for convolutions on a GPU; process settings do not affect a plan."""

    def as_on_a_gpu(dtype: str, device: torch.device) -> AbstractContextManager[None]:
        return own_arithmetic(dtype, torch.device("cuda"))

    monkeypatch.setattr(kernels, "own_arithmetic", as_on_a_gpu)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", dtype != "tf32")
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    seen = []
    real = programs.compute

    def spy(*given: Any) -> torch.Tensor:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        seen.append((cudnn.enabled, cudnn.allow_tf32, matmul.allow_tf32))
        return real(*given)

    monkeypatch.setattr(programs, "compute", spy)
    x = torch.randn(1, 4, 5, 5)
    engine = Engine(capture(nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2), (x,)), dtype, "twin")
    assert len(engine.plan(x).fallbacks) == 1
    engine(x)
    assert set(seen) == {(True, dtype == "tf32", dtype == "tf32")}
    assert torch.backends.cudnn.allow_tf32 == (dtype != "tf32") and not torch.backends.cudnn.enabled


def test_resnet18_on_one_image() -> None:
    """Every fourth pixel: the twin would take ten seconds for all of them."""
    model, image = models.model("resnet18")
    x = image[..., ::4, ::4].contiguous()
    engine = Engine(capture(model, (x,)), "fp16", "twin")
    assert not engine.plan(x).fallbacks
    with torch.no_grad():
        assert difference(engine(x), model(x)) <= TOLERANCE["fp16"]


def test_a_kernel_that_does_not_compile_gives_way_to_the_next_rung(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reported once; the plan is rebuilt with rungs that compile."""
    real = run.twin.build

    def broken(text: str, entry: str, **options: Any) -> Any:
        if entry == "pointwise_vectorised":
            raise CompileError(f"g++ refused {_program(text)}")
        return real(text, entry, **options)

    def _program(text: str) -> str:
        return next(str(program) for program in programs if program.text() == text)

    model = nn.Sequential(nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.ReLU6())
    x = torch.randn(1, 4, 5, 5)
    engine = Engine(capture(model, (x,)), "fp32", "twin")
    monkeypatch.setattr(ReluOperation, "preferred", lambda self, problem: ("vectorised", "naive"))
    sample = Engine(capture(model, (x,)), "fp32", "cpu").plan(x)
    programs = [program for step in sample.steps if step.recipe for program in step.recipe.programs]
    monkeypatch.setattr(run.twin, "build", broken)
    with caplog.at_level(logging.WARNING, logger="escalade"):
        assert difference(engine(x), model(x)) < 1e-5
        engine(torch.cat([x, x]))
    assert [record.message for record in caplog.records if "did not compile" in record.message] != []
    assert len([record for record in caplog.records if "relu/vectorised" in record.message]) == 1
    rungs = {step.choice.rung.name for step in engine.plan(x).steps if step.node.op == "relu" and step.choice}
    assert rungs == {"naive"}


@pytest.mark.parametrize("item", [(8, 7, 5), (16, 1, 1), (1, 6, 6)])
def test_an_image_that_is_also_returned_is_read_in_the_plans_type(item: tuple[int, int, int]) -> None:
    """In channels_last, one conversion serves both the caller, in the model's dtype, and kernels, in the plan's."""

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(item[0], 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.first(x)
            return y, self.second(y), x

    model, x = Returned().eval(), torch.randn(2, *item)
    engine = compile(model, x, dtype="fp16", device="twin")
    for given in (x, x.to(memory_format=torch.channels_last)):
        for found, expected in zip(engine(given), model(given), strict=True):
            assert found.dtype is torch.float32
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_that_is_only_normalised_is_not_the_same_bytes(channels: int) -> None:
    """An fp32 channels_last image is converted to neither another dtype nor another layout."""
    model = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(channels, 8, 1)).eval()
    mean, std = torch.rand(channels), torch.rand(channels) + 0.5
    x = (255 * torch.rand(2, channels, 6, 6)).to(memory_format=torch.channels_last)
    engine = compile(model, x, device="twin", normalize=(mean.tolist(), std.tolist()))
    expected = model((x / 255 - mean[:, None, None]) / std[:, None, None])
    torch.testing.assert_close(engine(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_maxima_of_whole_images_in_any_order(memory_format: torch.memory_format) -> None:
    class Maxima(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(x, (5, 6)).flatten(1)

    x = torch.randn(2, 8, 5, 6).to(memory_format=memory_format)
    engine = compile(Maxima().eval(), x, device="twin")
    torch.testing.assert_close(engine(x), x.amax((2, 3)))


def test_crops_chunks_permutes_and_windows_are_pytorchs() -> None:
    """Each is asymmetric: ends, axes and orders cannot be confused."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = self.first(x)
            turned = y.permute(0, 2, 3, 1).permute(0, 2, 1, 3).permute(3, 0, 1, 2)
            crops = [y[:, :, 1:6], y[:, :, :, 2:], y[:, :, 3:, :5], y[:, :, -4:]]
            crops += [*y.chunk(3, 2), *y.chunk(2, 3)]
            windows = [F.max_pool2d(y, (7, 9), padding=(1, 2)), F.max_pool2d(y, (7, 9))]
            return [self.second(crop) for crop in crops if min(crop.shape[2:]) > 2] + [*windows, turned * 2]

    model, x = Parts().eval(), torch.randn(2, 4, 7, 9)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=memory_format)
        for found, expected in zip(compile(model, given, device="twin")(given), model(given), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
