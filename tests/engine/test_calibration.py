"""Options of calibration: methods, bias correction, layers that stay in 16 bits, progress, and files of ranges."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import KEPT
from escalade.engine.passes import optimize, quantize
from escalade.engine.passes.calibrate import BINS, METHODS, Histogram, histograms
from escalade.engine.passes.sensitivity import agreement
from escalade.errors import EscaladeError, UnsupportedError
from escalade.ops.base.dtypes import LARGEST, STORAGE, stored_as

pytestmark = pytest.mark.usefixtures("all_in_8_bits")
CPU = torch.device("cpu")


class Network(nn.Module):
    """A stem and two convolutions; the second has filters that 8 bits represent badly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.first, self.second = (
            nn.Conv2d(3, 16, 3, 2),
            nn.Conv2d(16, 16, 3),
            nn.Conv2d(16, 16, 3),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        with torch.no_grad():
            self.second.weight[:, 0, 0, 0] = 40.0  # the other weights are a few quantization steps
            self.second.get_parameter("bias").sub_(40.0 * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(torch.relu(self.stem(x))))
        result: torch.Tensor = self.head(torch.relu(self.second(x)))
        return result


@pytest.fixture(scope="module")
def network() -> Network:
    return Network().eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(16, 3, 33, 33, generator=generator) for _ in range(2)]


def compiled(network: nn.Module, batches: Any, dtype: str = "int8", **options: Any) -> escalade.Engine:
    x = torch.zeros(16, 3, 33, 33)
    return escalade.compile(network, x, dtype=dtype, device="cpu", calibration=batches, **options)


def error(engine: escalade.Engine, network: nn.Module, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        found, expected = torch.cat([engine(x) for x in batches]), torch.cat([network(x) for x in batches])
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ("int8", "fp8"))
def test_entropy_is_least_among_the_ranges_that_are_tried(dtype: str) -> None:
    """Computes the divergence element by element, from the codes of the bins."""
    torch.manual_seed(0)
    values = torch.randn(100_000).abs()
    values[:3] = torch.tensor([30.0, 31.0, 32.0])
    found = Histogram.empty()
    found.add(values)
    counts = torch.histc(values, BINS, 0.0, 32.0).tolist()

    def divergence(limit: float) -> float:
        bins = math.ceil(limit * BINS / 32)
        kept = counts[:bins]
        wanted = [*kept[:-1], kept[-1] + sum(counts[bins:])]
        centers = torch.tensor([(index + 0.5) * 32 / BINS for index in range(bins)])
        codes = stored_as(centers * (LARGEST[dtype] / limit), STORAGE[dtype]).float().tolist()
        spread = []
        for code, count in zip(codes, kept, strict=True):
            same = [other for own, other in zip(codes, kept, strict=True) if own == code and other]
            spread.append(sum(same) / len(same) if count else 0.0)
        total, kept_total = sum(wanted), sum(spread)
        return sum(
            p / total * math.log(p / total / max(q / kept_total, 2.0**-40))
            for p, q in zip(wanted, spread, strict=True)
            if p
        )

    chosen = METHODS["entropy"](found, dtype)
    others = {tried: divergence(tried) for tried in (0.32, 1.28, 3.2, 4.48, 6.4, 16.0, 32.0, chosen)}
    assert min(others, key=others.__getitem__) == chosen or others[chosen] <= min(others.values()) + 1e-9
    empty = Histogram.empty()
    empty.add(torch.zeros(4))
    assert METHODS["entropy"](empty, dtype) == 0.0


def test_entropy_leaves_out_rare_outliers() -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000)
    values[0] = 40.0
    found = Histogram.empty()
    found.add(values)
    assert 3.0 < METHODS["entropy"](found, "int8") < 10.0


def test_bias_correction_removes_the_mean_error_of_weights(
    network: Network, batches: list[torch.Tensor]
) -> None:
    """The mean of each filter's result before the activation matches fp32, except for the border and activations."""
    graph = capture(network, (batches[0],))
    fused = optimize(graph, "int8")
    found = histograms(fused, batches, CPU)
    assert found["conv2d"].channel_means == pytest.approx(
        torch.cat([torch.relu(network.stem(x)) for x in batches]).mean((0, 2, 3)).tolist(), rel=1e-4
    )
    plain, corrected = (compiled(network, batches, bias_correction=flag) for flag in (False, True))
    assert error(corrected, network, batches) < 0.6 * error(plain, network, batches)


def test_means_are_saved(network: Network, batches: list[torch.Tensor], tmp_path: pathlib.Path) -> None:
    engine = compiled(network, batches, bias_correction=True)
    engine.save(tmp_path / "corrected.escalade")
    again = escalade.load(tmp_path / "corrected.escalade", device="cpu")
    assert torch.equal(again(batches[0]), engine(batches[0]))


def test_other_sizes_have_the_same_means(network: Network, batches: list[torch.Tensor]) -> None:
    engine = compiled(network, batches, bias_correction=True)
    larger = [nn.functional.pad(x, (0, 8, 0, 8)) for x in batches]
    plain = compiled(network, batches)
    assert not torch.equal(engine(larger[0]), plain(larger[0]))


def test_accuracy_keeps_the_layer_that_costs_the_most(network: Network, batches: list[torch.Tensor]) -> None:
    image = nn.Sequential(network.stem, nn.ReLU(), network.first, nn.ReLU(), network.second).eval()
    plain = compiled(image, batches)
    before = error(plain, image, batches)
    wanted = 1 - 0.75 * before
    engine = compiled(image, batches, accuracy=wanted)
    report = {layer.source: layer for layer in engine.calibration_report().layers}
    assert report["4"].products == "fp16" and report["2"].products == "int8"
    costs = {name: layer.cost for name, layer in report.items() if layer.cost is not None}
    assert costs.keys() == {"2", "4"} and costs["4"] > costs["2"] > 0
    assert error(engine, image, batches) <= 1 - wanted < before
    assert f"{costs['4']:.2%}" in str(engine.calibration_report())


def test_accuracy_of_one_keeps_everything_whose_error_shows(batches: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    image = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    engine = compiled(image, batches, accuracy=1.0)
    assert not [layer for layer in engine.calibration_report().layers if layer.products == "int8"]


def test_agreement_is_by_class_or_by_error() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 1.0], [5.0, 4.0]])
    assert agreement(scores * 1.5, scores) == 1.0
    assert agreement(scores.flip(1), scores) == 0.0
    assert agreement(torch.tensor([[2.0, 1.0], *scores[1:].tolist()]), scores) == 0.75
    images = torch.ones(2, 1, 3, 3)
    assert agreement(images * 1.01, images) == pytest.approx(0.99)


def test_ranges_in_a_file(network: Network, batches: list[torch.Tensor], tmp_path: pathlib.Path) -> None:
    kept = {"fp16": ["second"]}
    engine = compiled(network, batches, bias_correction=True, keep=kept)
    path = tmp_path / "ranges.json"
    engine.save_ranges(path)
    contents = json.loads(path.read_text())
    assert contents["kept"] == ["second"] and contents["dtype"] == "int8"
    first = next(value for value in contents["values"] if value["layer"] == "first")
    assert first["range"] == next(
        layer.range for layer in engine.calibration_report().layers if layer.source == "first"
    )
    again = compiled(network, path)
    assert torch.equal(again(batches[0]), engine(batches[0]))
    assert KEPT + "second" in again._captured.ranges

    def refused(match: str, text: str | None = None, dtype: str = "int8", **changed: Any) -> None:
        path.write_text(json.dumps({**contents, **changed}) if text is None else text)
        with pytest.raises(UnsupportedError, match=match):
            compiled(network, str(path), dtype)

    refused("holds no ranges", "not JSON")
    refused("holds no ranges", "[]")
    refused("of version 1", version=2)
    refused("has ranges for int8, not for fp8", dtype="fp8")
    refused("which this network does not have", values=[{**first, "name": "other"}])
    refused("is not a number >= 0", values=[{**first, "range": -1.0}])
    refused("has a value twice", values=[first, first])
    refused("has 1 means of", values=[{**first, "means": [1.0]}])
    refused("names 'none', which is not a layer", kept=["none"])
    with pytest.raises(UnsupportedError, match="does not exist"):
        compiled(network, tmp_path / "missing.json")
    with pytest.raises(EscaladeError, match="None is not a valid path"):
        engine.save_ranges(None)


def test_progress_is_shown_on_stderr(
    network: Network,
    batches: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    compiled(network, iter(batches), accuracy=0.5, progress=True)
    shown = capsys.readouterr()
    assert "measuring ranges" in shown.err and "trying layers" in shown.err and not shown.out
    compiled(network, batches)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "match"),
    (
        ({"accuracy": 0.0}, "above 0 and up to 1"),
        ({"accuracy": "high"}, "above 0 and up to 1"),
        ({"bias_correction": 1}, "pass True or False"),
        ({"progress": "bar"}, "pass True or False"),
        ({"dtype": "fp16", "accuracy": 0.9, "batches": None}, "accuracy is for dtype int8 or fp8"),
        ({"dtype": "fp16", "bias_correction": True, "batches": None}, "bias_correction is for dtype"),
        ({"accuracy": 0.9, "batches": "ranges.json"}, "accuracy needs calibration=batches"),
        ({"bias_correction": True, "batches": None}, "bias_correction needs calibration=batches"),
    ),
)
def test_errors(network: Network, batches: list[torch.Tensor], options: dict[str, Any], match: str) -> None:
    given = {"batches": batches, **options}
    with pytest.raises(UnsupportedError, match=match):
        compiled(network, given.pop("batches"), **given)


def test_weights_on_a_grid_keep_their_codes() -> None:
    torch.manual_seed(6)
    codes = torch.randint(-90, 91, (8, 16, 3, 3)).double()
    steps = torch.rand(8, dtype=torch.float64) + 0.1
    weight = (codes * steps.view(-1, 1, 1, 1)).float().double()
    assert torch.allclose(quantize._grid(weight, "int8"), steps, rtol=1e-5)
    weight[3, 0, 0, 0] += 0.3 * steps[3]
    weight[5] = 0.0
    found = quantize._grid(weight, "int8")
    assert found[3] == pytest.approx(float(weight[3].abs().max()) / 127) and found[5] == 0.0
    assert torch.allclose(found[6:], steps[6:], rtol=1e-5)
