"""Networks in FP8 and INT8: calibrated, quantized, close to fp32, and saved with their calibration."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import escalade
from escalade import models
from escalade.engine import compile
from escalade.engine.backend import escalade_backend
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.explain import explain_plan
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import FusionLevel, optimize, quantize
from escalade.engine.passes.calibrate import BINS, METHODS, Histogram, histograms
from escalade.engine.passes.estimates import Estimates, assumed_forms
from escalade.engine.passes.quantize import quantize_convolutions
from escalade.errors import UnsupportedError
from escalade.ops.base.card import H200
from escalade.ops.base.dtypes import QUANTIZED, STORAGE
from escalade_apps.classify.images import Crop, decode

ROOT = pathlib.Path(__file__).parent.parent.parent
DATA = pathlib.Path(os.environ.get("ESCALADE_DATA", ROOT.parent / "shared" / "data"))
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


all_in_8_bits = pytest.mark.usefixtures("all_in_8_bits")
each_dtype = pytest.mark.parametrize("dtype", QUANTIZED)
TOLERANCE = {"fp8": 0.06, "int8": 0.015}
"""Relative error of a small network's result."""


class Block(nn.Module):
    """ResNet block: its shortcut is a 1x1 convolution where the size changes."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(filters)
        self.second = nn.Conv2d(filters, filters, 3, 1, 1)
        self.shortcut = nn.Conv2d(channels, filters, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.second(inner) + self.shortcut(x))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 48, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(5)
    model = Small()
    models.settle(model, torch.randn(8, 3, 12, 12))
    return model.eval()


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, 3, 12, 12, generator=generator) for _ in range(count)]


def largest(graph: Graph, batches: Iterable[torch.Tensor]) -> dict[str, float]:
    return {name: each.largest for name, each in histograms(graph, batches, torch.device("cpu")).items()}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@all_in_8_bits
@each_dtype
def test_results_are_close_to_fp32(dtype: str, network: nn.Module) -> None:
    x = torch.randn(64, 3, 12, 12)
    engine = compile(network, x, dtype=dtype, device="cpu", calibration=batches())
    with torch.no_grad():
        expected = network(x)
    found = engine(x)
    assert found.dtype == torch.float32
    assert 1e-3 < difference(found, expected) < TOLERANCE[dtype]  # and not fp16 by mistake
    assert float((found.argmax(1) == expected.argmax(1)).float().mean()) > 0.9


@all_in_8_bits
@each_dtype
def test_the_kernels_match_the_references(dtype: str, network: nn.Module) -> None:
    """Except for sums on the boundary between two codes: there a last bit changes one part in 16."""
    x = torch.randn(2, 3, 12, 12)
    by_pytorch = compile(network, x, dtype=dtype, device="cpu", calibration=batches())
    by_kernels = compile(network, x, dtype=dtype, device="twin", calibration=batches())
    assert difference(by_kernels(x), by_pytorch(x)) < {"fp8": 0.015, "int8": 0.01}[dtype]


@all_in_8_bits
@each_dtype
@pytest.mark.parametrize("windows", (1, 2))
def test_only_means_of_whole_images_read_bytes(dtype: str, windows: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3),
        nn.AdaptiveAvgPool2d(windows), nn.Flatten(), nn.Linear(64 * windows**2, 7),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 12, 12)
    engine = compile(model, x, dtype=dtype, device="twin", calibration=[x])
    plan = engine.plan(x)
    layer = next(step.node.name for step in plan.steps if step.node.op == "conv2d")
    assert plan.forms[layer].dtype == (STORAGE[dtype] if windows == 1 else torch.float16)
    with torch.no_grad():
        assert difference(engine(x), model(x)) < TOLERANCE[dtype]


@all_in_8_bits
@each_dtype
def test_values_between_convolutions_are_stored_in_bytes(dtype: str, network: nn.Module) -> None:
    x = torch.randn(1, 3, 12, 12)
    plan = compile(network, x, dtype=dtype, device="cpu", calibration=batches()).plan(x)
    steps = [(step.node.op, plan.forms[step.node.name].dtype) for step in plan.steps]
    assert steps[:5] == [
        ("stem", STORAGE[dtype]),
        ("conv2d", STORAGE[dtype]),
        ("conv2d", STORAGE[dtype]),
        ("conv2d", STORAGE[dtype]),
        ("conv2d", STORAGE[dtype]),
    ]
    assert steps[5][1] == torch.float16, "the mean converts"
    half = compile(network, x, dtype="fp16", device="cpu").plan(x)
    assert plan.constant_bytes < 0.75 * half.constant_bytes


@all_in_8_bits
@each_dtype
def test_plans_of_channels_last_images_convert_nothing(dtype: str, network: nn.Module) -> None:
    x = torch.randn(2, 3, 12, 12)
    model = nn.Sequential(*[*network.children()][:2])
    engine = compile(model, x, dtype=dtype, device="cpu", calibration=batches())
    last = x.contiguous(memory_format=torch.channels_last)
    assert [step.node.op for step in engine.plan(last).steps] == ["stem", *["conv2d"] * 4]
    found = engine(last)
    assert torch.equal(found, engine(x)) and found.is_contiguous(memory_format=torch.channels_last)


@all_in_8_bits
@each_dtype
def test_explain_shows_quantized_steps(dtype: str, network: nn.Module) -> None:
    x = torch.randn(1, 3, 12, 12)
    engine = compile(network, x, dtype=dtype, device="cpu", calibration=batches())
    explanation = explain_plan(engine.plan(x))
    text = " ".join(str(explanation).split())  # lines are as wide as the terminal
    assert f"4 of 4 convolutions multiply in {dtype.upper()}" in text
    assert "0 of the steps only quantize" in text
    half = compile(network, x, dtype="fp16", device="cpu")
    assert dtype not in str(explain_plan(half.plan(x)))
    assert [step.dtype for step in explanation.steps[:2]] == ["fp16", dtype]


@all_in_8_bits
@each_dtype
def test_a_convolution_whose_channels_do_not_fit_stays_in_fp16(dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(5, 24, 3), nn.ReLU(), nn.Conv2d(24, 32, 3), nn.ReLU(), nn.Conv2d(32, 128, 3), nn.Sigmoid()
    ).eval()
    x = torch.randn(2, 5, 9, 9)
    engine = compile(model, x, dtype=dtype, device="cpu", calibration=[x])
    assert f"1 of 3 convolutions multiply in {dtype.upper()}" in str(explain_plan(engine.plan(x)))
    with torch.no_grad():
        assert difference(engine(x), model(x)) < 0.05


@all_in_8_bits
@each_dtype
def test_a_value_that_others_read_too_is_kept_and_copied(dtype: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Conv2d(128, 128, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.relu(self.first(x))
            return self.second(y) + self.third(y), y

    torch.manual_seed(1)
    model = Shared().eval()
    x = torch.randn(1, 128, 4, 4)
    engine = compile(model, x, dtype=dtype, device="twin", calibration=[x])
    copies = [step for step in engine.plan(x).steps if step.node.op == "quantise"]
    assert len(copies) == 2  # of x, and of y once for both readers
    with torch.no_grad():
        expected = model(x)
    for found, right in zip(engine(x), expected, strict=True):
        assert difference(found, right) < 0.06


@all_in_8_bits
@each_dtype
def test_values_beyond_the_calibrated_range_saturate(dtype: str, network: nn.Module) -> None:
    x = torch.randn(2, 3, 12, 12)
    engine = compile(network, x, dtype=dtype, device="cpu", calibration=[x / 100])
    assert bool(engine(x).isfinite().all())


@all_in_8_bits
@each_dtype
@pytest.mark.parametrize(("factor", "bias"), ((1e-13, 0.0), (1e3, 0.0), (1.0, -1e3)))
def test_values_of_any_magnitude_have_scales(dtype: str, factor: float, bias: float) -> None:
    """Including a stem whose result is always 0: its weights in 16 bits could not include such a scale."""
    torch.manual_seed(4)
    x = torch.randn(2, 3, 12, 12)
    first, second, third = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3)
    with torch.no_grad():
        first.weight.mul_(factor)
        first.bias.mul_(factor).add_(bias)  # type: ignore[union-attr]
        second.weight.div_(factor)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).eval()
    engine = compile(model, x, dtype=dtype, device="twin", calibration=[x])
    assert f"2 of 2 convolutions multiply in {dtype.upper()}" in str(explain_plan(engine.plan(x)))
    with torch.no_grad():
        assert difference(engine(x), model(x)) < TOLERANCE[dtype]


@all_in_8_bits
@each_dtype
def test_a_saved_engine_needs_no_calibration(dtype: str, network: nn.Module, tmp_path: pathlib.Path) -> None:
    x = torch.randn(2, 3, 12, 12)
    engine = compile(network, x, dtype=dtype, device="cpu", calibration=batches())
    engine.save(tmp_path / "small.escalade")
    again = escalade.load(tmp_path / "small.escalade", device="cpu")
    assert again.dtype == dtype
    assert torch.equal(again(x), engine(x))


def test_ranges_are_the_largest_magnitudes(network: nn.Module) -> None:
    graph = optimize(capture(network, (torch.randn(1, 3, 12, 12),)), "int8")
    found = largest(graph, batches())
    with torch.no_grad():
        stem = max(float(network.stem(batch).abs().max()) for batch in batches())  # type: ignore[operator]
    name = next(node.name for node in graph if node.op == "stem")
    assert found[name] == pytest.approx(stem, rel=1e-5)
    assert largest(graph, iter(batches())) == found


@each_dtype
def test_optimising_twice_gives_the_same_graph(dtype: str, network: nn.Module) -> None:
    graph = capture(network, (torch.randn(1, 3, 12, 12),))
    graph.ranges = largest(optimize(graph, dtype), batches())
    first, second = optimize(graph, dtype), optimize(graph, dtype)
    assert first.nodes == second.nodes and first.constants.keys() == second.constants.keys()
    assert not any("quantized" in node.attributes for node in graph)


@each_dtype
def test_errors(dtype: str, network: nn.Module) -> None:
    x = torch.randn(2, 3, 12, 12)
    with pytest.raises(UnsupportedError, match=f"{dtype} needs calibration"):
        compile(network, x, dtype=dtype, device="cpu")
    with pytest.raises(UnsupportedError, match="calibration is for dtype int8 or fp8"):
        compile(network, x, dtype="fp16", device="cpu", calibration=[x])
    with pytest.raises(UnsupportedError, match="no batches"):
        compile(network, x, dtype=dtype, device="cpu", calibration=[])
    with pytest.raises(UnsupportedError, match="calibration batch has shape"):
        compile(network, x, dtype=dtype, device="cpu", calibration=[torch.randn(2, 3, 8, 8)])
    with pytest.raises(UnsupportedError, match="calibration batch of 2 tensors"):
        compile(network, x, dtype=dtype, device="cpu", calibration=[(x, x)])
    with pytest.raises(UnsupportedError, match="not finite"):
        compile(network, x, dtype=dtype, device="cpu", calibration=[x / 0])
    with pytest.raises(UnsupportedError, match="needs calibration"):
        escalade_backend(torch.fx.symbolic_trace(network), [x], options={"dtype": dtype})
    graph = capture(network, (x,))
    with pytest.raises(UnsupportedError, match="ranges"):
        Engine(graph, dtype, "cpu")
    graph.ranges = {"stem": 1.0}
    with pytest.raises(UnsupportedError, match="fused plans"):
        Engine(graph, dtype, "cpu", fusion=FusionLevel.separate)


class Layers(nn.Module):
    """Wide and narrow layers, whose results are also added, returned, and read by a layer in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.again = (nn.Conv2d(256, 256, 3, padding=1) for _ in range(2))
        self.narrow, self.thin = nn.Conv2d(256, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.back, self.odd = nn.Conv2d(32, 256, 3, padding=1), nn.Conv2d(256, 5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.wide(x))
        z = torch.relu(self.thin(torch.relu(self.narrow(y))))
        y = torch.relu(self.again(torch.relu(self.back(z))) + y)
        return self.odd(y), y.mean((2, 3))


@each_dtype
def test_the_layers_in_8_bits_are_the_fastest_set(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum cut takes as long as the fastest of all sets, each quantized and estimated as a whole."""
    monkeypatch.setattr(quantize, "_grid", quantize._steps)  # which takes less time
    x = torch.randn(2, 256, 28, 28)
    graph = capture(Layers().eval(), (x,))
    graph.ranges = dict.fromkeys(optimize(graph, dtype).nodes, 1.0)
    plain, estimates = optimize(graph, dtype).at(32), Estimates(H200)
    layers = [node.name for node in plain if quantize.quantized_weights(node)]

    def us(**given: Any) -> tuple[float, int]:
        made = plain.copy()
        quantize_convolutions(made, dtype, **given)
        made.remove_dead_code()
        steps = [node for node in made if node.op in ("conv2d", "quantise")]
        total = estimates.total_us(steps, assumed_forms(made, dtype))
        assert total is not None
        return total, sum(bool(node.attributes.get("quantized")) for node in made)

    sets = [only for size in range(len(layers) + 1) for only in combinations(layers, size)]
    (found, count), tried = us(estimates=estimates), [us(only=only)[0] for only in sets]
    assert found == pytest.approx(min(tried), abs=0.1) and found < tried[0]
    assert 0 < count < len(layers)


def test_methods_choose_ranges() -> None:
    """A normal distribution with one outlier: the maximum covers it, the percentile does not."""
    torch.manual_seed(3)
    values = torch.randn(200_000).relu()
    values[7] = 40.0
    found = Histogram.empty()
    for part in values.split(50_000):
        found.add(part)
    assert found.zeros + float(found.counts.sum()) == len(values) and found.counts.numel() == BINS
    chosen = {name: method(found, "int8") for name, method in METHODS.items()}
    assert chosen["max"] == 40.0
    assert chosen["percentile"] == pytest.approx(float(values.quantile(0.9999)), abs=found.limit / BINS)

    def error(range: float) -> float:
        step = range / 127
        return float(((values / step).round().clamp(-128, 127) * step - values).square().sum())

    assert all(error(chosen["mse"]) <= 1.02 * error(range) for range in (5.0, 10.0, 20.0, 30.0, 40.0))
    for range in (4.0, 40.0):  # the estimated error is that of quantizing
        seen = found.calibrated(range, "int8")
        assert seen.snr_db == pytest.approx(
            10 * math.log10(float(values.square().sum()) / error(range)), abs=0.5
        )
        assert seen.saturated == pytest.approx(float((values > range).float().mean()), abs=1e-5)
    assert METHODS["mse"](found, "fp8") > 20.0  # e4m3 has equally many bits for small values
    empty = Histogram.empty()
    empty.add(torch.zeros(5))
    assert [method(empty, "int8") for method in METHODS.values()] == [0.0] * len(METHODS)


@all_in_8_bits
@each_dtype
def test_the_report_lists_quantized_and_kept_layers(
    dtype: str, network: nn.Module, tmp_path: pathlib.Path
) -> None:
    x = torch.randn(2, 3, 96, 96)  # enough products to outweigh a copy
    kept = {"fp16": ["blocks.0.first"]}
    batches = [x]
    engine = compile(
        network, x, dtype=dtype, device="cpu", calibration=batches, calibration_method="mse", keep=kept
    )
    report = engine.calibration_report()
    by_source = {layer.source: layer for layer in report.layers}
    assert by_source["blocks.0.first"].products == "fp16" and by_source["blocks.0.second"].products == dtype
    layer = by_source["blocks.0.second"]
    assert layer.largest is not None and layer.snr_db is not None and layer.saturated is not None
    assert 0 < layer.range <= layer.largest and layer.snr_db > 20 and 0 <= layer.saturated < 0.05
    assert "blocks.0.second" in str(report) and '"snr_db"' in report.to_json()
    engine.save(tmp_path / "kept.escalade")
    again = escalade.load(tmp_path / "kept.escalade", device="cpu")
    assert torch.equal(again(x), engine(x))
    loaded = {layer.source: layer for layer in again.calibration_report().layers}
    assert loaded["blocks.0.first"].products == "fp16" and loaded["blocks.0.second"].range == layer.range
    with torch.no_grad():
        assert difference(engine(x), network(x)) < TOLERANCE[dtype]
    for changed, match in (
        ({"keep": {"fp16": ["nothing"]}}, "not a layer"),
        ({"keep": {"fp32": ["stem"]}}, "stay in 16 bits"),
        ({"keep": {"fp16": "stem"}}, "stay in 16 bits"),
        ({"calibration_method": "best"}, "pass one of"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            compile(network, x, dtype=dtype, device="cpu", calibration=batches, **changed)
    with pytest.raises(UnsupportedError, match="keep is for dtype"):
        compile(network, x, dtype="fp16", device="cpu", keep=kept)
    with pytest.raises(UnsupportedError, match="only int8 and fp8"):
        compile(network, x, dtype="fp16", device="cpu").calibration_report()


@each_dtype
def test_photographs_get_the_classes_of_fp32(dtype: str) -> None:
    files = sorted((DATA / "images").glob("*.JPEG"))
    weights = DATA / "resnet18_imagenet_rebuilt_fp16.safetensors"
    if not files or not weights.is_file():
        pytest.skip(f"no photographs or weights of ResNet-18 under {DATA}")
    model = models.read_resnet(weights).eval()
    pictures = [torch.from_numpy(np.array(decode(file, Crop(256, 224)))) for file in files]
    images = torch.stack(pictures).permute(0, 3, 1, 2)
    seen, unseen = images[::2], images[1::2]
    engine = compile(model, unseen, dtype=dtype, device="cpu", normalize=NORMALIZE, calibration=[seen])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZE)
    with torch.no_grad():
        expected = model((unseen / 255 - mean) / std)
    found = engine(unseen)
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    assert same >= len(unseen) - 2, f"{same} of {len(unseen)} classes are those of fp32"
    assert difference(found, expected) < 0.1
