"""The page of layers: sets as they were asked for, what became of each layer, the last run alone."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from escalade.bench.layers import sets
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import tables
from escalade.report.layer_pages import layers_page

COMMAND = "escalade layers resnet18 -b 32 -t fp16"


def record(
    problem: str, us: float | None, system: str = "escalade", rung: str = "window", **rest: object
) -> Record:
    made = Record(
        "layers", problem, "fp16", "nhwc", 32, system, rung if system == "escalade" else "", timing="graph",
        median_us=us, tflops=400.0, floor_us=None if us is None else us / 4, gpu="NVIDIA H200", driver="580.1",
        commit="abc", date="2026-01-02T03:04:05+00:00", command=COMMAND, versions={"torch": "2.11"},
    )  # fmt: skip
    return replace(made, **rest)  # type: ignore[arg-type]


def page(*records: Record) -> str:
    return layers_page({"h200": list(records)}, "h200")


def line(text: str, problem: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| `{problem}`"))


LAYERS = sets.named("resnet18", 32, "fp16")
FIRST, SECOND, THIRD, FOURTH = (layer.problem.name for layer in LAYERS[:4])


def test_without_records_the_page_says_so(tmp_path: pathlib.Path) -> None:
    assert "no records yet" in layers_page({}, "h200")
    assert "no records yet" in page(record(FIRST, 1.0, workload="conv2d"))


def test_a_set_that_was_asked_for_has_all_its_layers() -> None:
    text = page(
        record(FIRST, 10.0),
        record(FIRST, 30.0, "torch-nhwc"),
        record(FIRST, 20.0, "cudnn-graph"),
        record(FIRST, 25.0, "torch-compile"),
        record(SECOND, 8.0),
        record(SECOND, 4.0, "cudnn-fused-nhwc"),
        record(SECOND, 5.0, "torch-compile"),
        record(FOURTH, 8.0),
        record(FOURTH, 90.0, "torch-nhwc"),
        record(THIRD, None, failure="its error is 3\nand more"),
    )
    assert "## NVIDIA H200" in text and f"- `{COMMAND}`" in text
    assert "#### resnet18, forward, fp16, batch 32" in text and "resnet50" not in text
    assert line(text, FIRST).endswith("| window | cudnn-graph | 1 | 10.00 | 400 | 25.0 | 20.00 | 2.00× |")
    count = next(layer.count for layer in LAYERS if layer.problem.name == SECOND)
    assert f"| cudnn-fused-nhwc | {count} | 8.00 |" in line(text, SECOND) and "0.50×" in line(text, SECOND)
    assert line(text, FOURTH).endswith("| 90.00 | no fused peer |"), "two launches are no peer of one"
    assert "failed: its error is 3 |" in line(text, THIRD) and "and more" not in text
    assert text.count("| not measured |") == len(LAYERS) - 4
    assert "2 layers (without the 1 that have no such ratio): 1.000× the fastest peer's speed" in text
    assert "in the geometric mean; worst 0.500×" in text


def test_layers_named_one_by_one_stand_by_themselves() -> None:
    alone = "8to16_9_k3s1_b2_bias+relu"
    text = page(
        record(alone, 5.0, command=f"escalade layers {alone}"), record(FIRST, 5.0, command="escalade layers")
    )
    assert "#### others, forward, fp16" in text and "#### resnet18" not in text
    assert "| 5.00 |" in line(text, alone) and "| 5.00 |" in line(text, FIRST)


@pytest.mark.parametrize("command", [COMMAND, "another way to call it"])
def test_a_set_that_is_all_here_is_shown_whoever_asked(command: str) -> None:
    records = [record(layer.problem.name, 1.0, command=command) for layer in LAYERS]
    text = page(*records)
    assert "#### resnet18, forward, fp16, batch 32" in text and "#### stem" not in text
    assert "#### others" not in text


def test_gradients_have_tables_of_their_own_and_fp8_is_compared_with_fp16() -> None:
    (gradient, *_) = sets.in_direction(LAYERS, "weight_gradient")
    text = page(
        record(FIRST, 10.0),
        record(FIRST, 4.0, dtype="fp8"),
        record(gradient.problem.name, 9.0, workload="layers_weight_gradient"),
    )
    assert text.index("### Forward") < text.index("### Gradients of weights")
    assert "#### resnet18, weight gradient, fp16, batch 32" in text and "Gradients of inputs" not in text
    assert text.index("forward, fp16") < text.index("forward, fp8")
    assert "fp8 over our own fp16: 2.500× in the geometric mean of 1 layers" in text


def test_the_page_is_written_and_becomes_stale(tmp_path: pathlib.Path) -> None:
    (tmp_path / "README.md").write_text("\n".join(tables.markers(tables.NETWORKS)))
    store.file_away(tmp_path / "results", [record(FIRST, 10.0)])
    assert tmp_path / "docs/layers.md" in tables.write(tmp_path / "results", tmp_path)
    assert tables.stale(tmp_path / "results", tmp_path) == []
    store.file_away(tmp_path / "results", [record(FIRST, 9.0)])
    assert tmp_path / "docs/layers.md" in tables.stale(tmp_path / "results", tmp_path)
