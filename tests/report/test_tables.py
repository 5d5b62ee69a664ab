"""Generated tables: what is in them comes from records, and they are the same every time."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from escalade.errors import EscaladeError
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import ladder_pages, tables

DIRECT = Record(
    "conv2d", ladder_pages.CLIMB_PROBLEM, "fp32", "nchw", 256, "escalade", "direct", config={"threads": 256},
    timing="graph", samples=9, median_us=60000.0, p20_us=59000.0, p80_us=61000.0, tflops=1.0, gbps=7.0, floor_us=1200.0,
    peak_pct=2.0, error=1.5e-7, registers=40, occupancy=0.75, gpu="NVIDIA H200", driver="580.1", commit="abc",
    date="2026-01-02T03:04:05+00:00", command="escalade ladder conv2d", versions={"torch": "2.11"},
)  # fmt: skip
TILED = replace(
    DIRECT, rung="input_tile", median_us=30000.0, tflops=2.0, gain=2.0, predicted_gain=1.5, peer_gain=0.1,
    gain_over="direct fp32 nchw", config={"rows": 8, "padded": True, "vector": False},
)  # fmt: skip
PEER = replace(DIRECT, system="torch-nhwc", layout="nhwc", rung="", config={}, median_us=3000.0, tflops=20.0)
FAILED = replace(DIRECT, rung="restrict", median_us=None, tflops=None, failure="its error is 3\nand more")
OTHER = replace(TILED, problem="128to128_28_k3s1_b256", dtype="fp16", peer_gain=1.25, tflops=600.0)
ABLATION = replace(TILED, workload="conv2d_ablation", rung="tuned-without-padded_tile", gain=1.3)
EMPTY = "before\n{}\n{}\nafter\n".format(*tables.markers(tables.NETWORKS))
RECORDS = [DIRECT, TILED, PEER, FAILED, OTHER, ABLATION]


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "README.md").write_text(EMPTY)
    return tmp_path


def test_without_records_the_block_is_empty_and_the_page_says_so(root: pathlib.Path) -> None:
    tables.write(root / "results", root)
    assert (root / "README.md").read_text() == EMPTY
    assert "no records yet" in (root / "docs/ladder.md").read_text()
    assert tables.stale(root / "results", root) == []


def test_records_become_tables_and_a_plot(root: pathlib.Path) -> None:
    store.file_away(root / "results", RECORDS)
    assert [path.name for path in tables.stale(root / "results", root)] == [
        "ladder.md",
        "conv2d.md",
        "networks.md",
        "layers.md",
        "coverage.md",
        "plans.md",
        "resnet18.md",
    ]
    written = tables.write(root / "results", root)
    assert tables.stale(root / "results", root) == []
    assert (root / ladder_pages.PLOT) in written and (root / ladder_pages.PLOT).read_text().startswith(
        "<?xml"
    )
    page = (root / "docs/ladder.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| input_tile |"))
    assert "30,000" in row and "2,000" in row and "2.00×" in row and "1.50×" in row
    assert f"](images/{ladder_pages.PLOT.name})" in page
    best = next(line for line in page.splitlines() if line.startswith(f"| `{DIRECT.problem}` | fp32 |"))
    assert "| input_tile |" in best and "| 3,000 | 0.10× |" in best and "(ladders/conv2d.md)" in page
    page = (root / "docs/ladders/conv2d.md").read_text()
    assert "rows=8 padded" in page and "vector" not in page
    assert "failed: its error is 3 |" in page and "and more" not in page
    assert "tuned-without-padded_tile" in page and "1.30×" in page
    assert "`escalade ladder conv2d`" in page and "580.1" in page


def test_the_same_records_give_the_same_files(root: pathlib.Path) -> None:
    store.file_away(root / "results", RECORDS)
    first = {path: path.read_bytes() for path in tables.write(root / "results", root)}
    again = {path: path.read_bytes() for path in tables.write(root / "results", root)}
    assert first == again


def test_a_changed_record_makes_the_tables_stale(root: pathlib.Path) -> None:
    store.file_away(root / "results", RECORDS)
    tables.write(root / "results", root)
    store.file_away(root / "results", [replace(DIRECT, median_us=50000.0)])
    assert tables.stale(root / "results", root)


def test_missing_markers_are_an_error(root: pathlib.Path) -> None:
    (root / "README.md").write_text("no markers")
    with pytest.raises(EscaladeError, match="networks:begin"):
        tables.write(root / "results", root)


NETWORK = Record(
    "resnet18", "224_b8", "fp16", "nhwc", 8, "escalade", "", timing="graph", samples=9, median_us=200.0, p20_us=199.0,
    p80_us=201.0, images_per_s=40000.0, wall_us=240.0, floor_us=40.0, error=8e-4, peak_bytes=32 << 20,
    gpu="NVIDIA H200", driver="580.1", commit="abc", date="2026-01-02T03:04:05+00:00",
    command="escalade bench resnet18", versions={"torch": "2.11"},
)  # fmt: skip


def test_networks_have_a_table_a_page_and_a_plot(root: pathlib.Path) -> None:
    graph = replace(NETWORK, system="torch-graph", median_us=400.0, peak_bytes=128 << 20, wall_us=410.0)
    compiled = replace(NETWORK, system="torch-compile", median_us=300.0, peak_bytes=None, wall_us=390.0)
    jax = replace(NETWORK, system="jax", timing="calls", median_us=350.0, peak_bytes=None, wall_us=360.0)
    accuracy = replace(
        NETWORK, workload="resnet18_accuracy", note="the same top-1 on 54 of 54", median_us=None
    )
    phase = replace(NETWORK, workload="resnet18_phases", rung="naive", batch=1, median_us=9000.0, gain=4.0)
    alone = replace(NETWORK, workload="resnet18_stream", rung="compute alone", median_us=100.0)
    copies = replace(alone, rung="copies alone", median_us=60.0)
    streamed = replace(alone, rung="stream, pinned", median_us=125.0)
    store.file_away(
        root / "results", [NETWORK, graph, compiled, jax, accuracy, phase, alone, copies, streamed]
    )
    written = tables.write(root / "results", root)
    assert root / "docs/images/resnet18.svg" in written
    assert tables.stale(root / "results", root) == []
    readme = (root / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n")
    row = next(line for line in readme.splitlines() if line.startswith("| fp16 | 8 |"))
    assert "| **200.0** | 300.0 (torch.compile max-autotune) | 1.50× |" in row
    assert "| **240.0** | 360.0 (JAX) | 1.50× |" in row
    page = (root / "docs/networks.md").read_text()
    assert "| fp16 | 8 | **200.0** | 400.0 | 300.0 | 1.50× | 40,000 | 5.00 | 8.0e-04 |" in page
    assert "| fp16 | 8 | **240.0** | 410.0 | 390.0 | 360.0 | 1.50× |" in page
    assert "| fp16 | 8 | 32.0 | 128.0 | 25% |" in page
    assert "54 of 54" in page and "4.00×" in page
    assert "| fp16 | stream, pinned | 8 | 125.0 | 40,000 | 80% |" in page
