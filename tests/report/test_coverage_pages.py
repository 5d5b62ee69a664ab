"""The page of many networks: what became of each, beside its peers, and the sums."""

from __future__ import annotations

from dataclasses import replace

from escalade.measure.records import Record
from escalade.report.coverage import coverage_tables, lines
from escalade.report.coverage_pages import coverage_page

OURS = Record(
    "coverage_torchvision", "resnet18_224_b32", "fp16", "nhwc", 32, "escalade", "", timing="graph", median_us=250.0,
    wall_us=300.0, error=2e-4, tolerance=4e-4, config={"steps": 20, "launches": 18, "pytorch": {}}, gpu="NVIDIA H200",
    driver="580.1", commit="abc", date="2026-01-02T03:04:05+00:00", command="escalade coverage torchvision",
)  # fmt: skip
GRAPH = replace(OURS, system="torch-graph", median_us=500.0, wall_us=540.0, config={})
COMPILED = replace(GRAPH, system="torch-compile-default", median_us=400.0, wall_us=450.0)
SLOW = replace(
    OURS, problem="convnext_tiny_224_b32", median_us=1000.0,
    config={"steps": 9, "launches": 5, "pytorch": {"permute": 3, "gelu": 1}},
)  # fmt: skip
FAILED = replace(
    OURS, problem="vit_224_b32", median_us=None, wall_us=None, error=None, config={}, failure="no\nway"
)


def line(text: str, network: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {network} "))


def test_without_records_the_page_says_so() -> None:
    assert "not been measured yet" in coverage_page({}, "h200")
    assert "not been measured yet" in coverage_page({"h200": [replace(OURS, workload="resnet18")]}, "h200")


def test_a_row_has_both_clocks_and_a_ratio_over_the_best_where_all_were_measured() -> None:
    slower = [replace(record, problem=SLOW.problem) for record in (GRAPH, COMPILED)]
    lone, peer = (replace(record, problem="vgg16_224_b32") for record in (OURS, GRAPH))
    text = coverage_page({"h200": [OURS, GRAPH, COMPILED, SLOW, *slower, FAILED, lone, peer]}, "h200")
    whole = (
        "| resnet18 | 2.0e-04 of 4.0e-04 | 0 | 18 | **250.0** | 500.0 | 400.0 | 1.60× | **300.0** | 540.0 | 450.0 "
        "| 1.50× |"
    )
    assert line(text, "resnet18") == whole
    assert "4 (permute 3, gelu 1)" in line(text, "convnext_tiny")
    assert line(text, "vgg16").endswith("| 540.0 |  |  |"), "without torch.compile there is no best peer"
    assert "failed: no |" in line(text, "vit")
    assert "3 of 4 networks have a plan; 3 are right; 2 leave nothing to PyTorch" in text
    assert (
        "1 of 2 are no slower than the best peer, 0.80× as fast in the geometric mean, 0.40× at worst" in text
    )
    assert "; 1 lack a peer and have no ratio." in text
    assert "Steps in PyTorch, over all networks: permute 3, gelu 1." in text


def test_rows_of_several_commits_say_their_own() -> None:
    later = [replace(record, problem=SLOW.problem, commit="def") for record in (SLOW, GRAPH, COMPILED)]
    text = coverage_page({"h200": [OURS, GRAPH, COMPILED, *later]}, "h200")
    assert line(text, "resnet18").endswith("| abc |") and line(text, "convnext_tiny").endswith("| def |")


def test_on_a_terminal_a_line_for_each_and_no_empty_columns() -> None:
    (said,) = lines([OURS, GRAPH, COMPILED])
    assert said.startswith(
        "resnet18 fp16 b32: 2.0e-04 of 4.0e-04; in PyTorch 0, 18 launches; escalade 250.0 µs"
    )
    assert said.endswith("1.60× and 1.50× the best peer's speed")
    plan = replace(OURS, median_us=None, wall_us=None, error=None)
    (table,) = coverage_tables([plan])
    assert [column.header for column in table.columns] == [
        "network",
        "error of allowed",
        "in PyTorch",
        "launches",
    ]
