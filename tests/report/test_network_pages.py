"""Pages of LeNet and of the spectral autoencoder: op times, right answers, times over batches."""

from __future__ import annotations

import io
import pathlib
from dataclasses import replace

import pytest
from rich.console import Console

from escalade.bench.networks.op_times import FORMS
from escalade.measure import records as store
from escalade.measure.records import Provenance, Record
from escalade.report import network_pages, tables
from escalade.report.networks import network_tables
from escalade.report.op_time_pages import op_times

ORIGIN = Provenance(
    "NVIDIA H200", "580.1", {"torch": "2.11"}, "abc", "2026-01-02T03:04:05+00:00", "escalade bench"
)
FIRST, SECOND = (name.format(batch=10_000) for name in FORMS[""])


def convolution(problem: str, dtype: str, layout: str, who: str, microseconds: float) -> Record:
    peer = who.startswith("torch")
    return Record(
        "few_channels", problem, dtype, layout, 10_000, who if peer else "escalade", "" if peer else who,
        timing="graph", median_us=microseconds,
    ).stamped(ORIGIN)  # fmt: skip


CONVOLUTIONS = [
    convolution(FIRST, "fp32", "nchw", "torch-nchw", 7000.0),
    convolution(SECOND, "fp32", "nchw", "torch-nchw", 5600.0),
    convolution(FIRST, "fp32", "nchw", "rows", 400.0),
    convolution(FIRST, "fp32", "nhwc", "rows", 500.0),
    convolution(SECOND, "fp32", "nchw", "rows", 1300.0),
    convolution(SECOND, "fp32", "nhwc", "rows", 1250.0),
    convolution(FIRST, "fp32", "nchw", "matrix_unroll", 9000.0),
    convolution(SECOND, "fp32", "nchw", "matrix_unroll", 30000.0),
    convolution(FIRST, "tf32", "nchw", "tensor_cores", 3000.0),
    convolution(SECOND, "tf32", "nchw", "tensor_cores", 4000.0),
    convolution(FIRST, "fp16", "nchw", "half", 1000.0),
]
LENET = Record(
    "lenet", "86_b10000", "fp16", "nhwc", 10_000, "escalade", "", timing="graph", median_us=800.0, wall_us=900.0,
    images_per_s=12.5e6, floor_us=400.0, error=8e-4, peak_bytes=64 << 20,
).stamped(ORIGIN)  # fmt: skip
ANSWERS = [
    replace(
        LENET, workload="lenet_accuracy", problem=f"fashion_mnist_n{count}", batch=count, accuracy=share,
        median_us=None, images_per_s=None, wall_us=None, note=f"float64: {share:.4f}",
    )
    for count, share in ((100, 0.86), (1_000, 0.887), (10_000, 0.8715))
]  # fmt: skip
COPIES = replace(LENET, workload="lenet_stream", rung="copies alone", median_us=100.0)
STREAM = replace(COPIES, rung="stream, pinned", median_us=125.0)
ROWS = replace(
    LENET, workload="spectral_autoencoder", problem="320_b512", batch=512, layout="flat", median_us=4.0, wall_us=20.0,
    gbps=160.0, copy_pct=3.8,
)  # fmt: skip
EAGER = replace(ROWS, system="torch-eager", timing="calls", median_us=200.0, wall_us=230.0)
GRAPH = replace(ROWS, system="torch-graph", median_us=100.0, wall_us=110.0)
COMPILE = replace(ROWS, system="torch-compile", median_us=10.0, wall_us=90.0)
SCORE = replace(ROWS, workload="spectral_autoencoder_score")
RECORDS = [*CONVOLUTIONS, LENET, *ANSWERS, COPIES, STREAM, ROWS, EAGER, GRAPH, COMPILE, SCORE]


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "README.md").write_text("\n".join(tables.markers(tables.NETWORKS)))
    return tmp_path


def test_op_times_are_sums_of_the_faster_layouts_in_the_ladders_order() -> None:
    (found,) = op_times(CONVOLUTIONS)
    assert (found.storage, found.batch) == ("fp32", 10_000), "fp16 lacks the second convolution"
    assert [variant.name for variant in found.variants] == [
        "PyTorch (cuDNN), NCHW", "matrix_unroll", "tensor_cores (TF32)", "rows",
    ]  # fmt: skip
    assert found.variants[-1].cells == ("rows", "0.400 ms", "1.250 ms", "1.650 ms")
    assert found.variants[0].sum == 12_600.0


def test_records_become_pages_and_plots(root: pathlib.Path) -> None:
    store.file_away(root / "results", RECORDS)
    written = tables.write(root / "results", root)
    assert tables.stale(root / "results", root) == []
    assert {path.name for path in written if path.suffix == ".svg"} == {
        "lenet.svg",
        "spectral_autoencoder.svg",
    }
    page = (root / "docs/networks.md").read_text()
    assert "| rows | 0.400 ms | 1.250 ms | 1.650 ms |" in page
    assert "| fp16 | 0.8600 | 0.8870 | 0.8715 | 8.0e-04 |" in page
    assert "| fp16 | stream, pinned | 10,000 | 125.0 | 12,500,000 | 80% |" in page
    assert "| fp16 | 512 | **4.00** | 100.0 | 10.00 | 2.50× | 12,500,000 | 160 | 3.8 | 8.0e-04 |" in page
    assert "| fp16 | 512 | **20.00** | 230.0 | 110.0 | 90.00 | 4.50× |" in page
    assert "| fp16 | 512 | **4.00** | not measured: torch-graph, torch-compile |" in page
    assert "Anomaly scores" in page
    ladder = (root / "docs/ladders/few_channels.md").read_text()
    assert ladder.index("| matrix_unroll |") < ladder.index("| rows |"), "in the order of its own ladder"


def test_answers_alone_have_no_plot(root: pathlib.Path) -> None:
    store.file_away(root / "results", ANSWERS)
    assert not [path for path in tables.write(root / "results", root) if path.suffix == ".svg"]
    page = (root / "docs/networks.md").read_text()
    assert "0.8870" in page and "lenet.svg" not in page


def test_the_terminal_shows_how_much_faster() -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    for table in network_tables(RECORDS):
        console.print(table)
    text = console.export_text()
    for expected in ("2.50×", "4.50×", "Sum of Op-Times", "0.8715", "80%", "rows of 320"):
        assert expected in text


def test_what_8_bits_cost_is_said_from_records(root: pathlib.Path) -> None:
    half = replace(LENET, workload="resnet18", problem="224_b256", batch=256, median_us=1000.0)
    store.file_away(root / "results", [half, replace(half, dtype="fp8", median_us=1250.0)])
    tables.write(root / "results", root)
    page = (root / "docs/networks.md").read_text()
    assert "FP8 through the engine takes 1.25 times fp16's at batch 256." in page
    store.file_away(root / "without", [half])
    tables.write(root / "without", root)
    assert "FP8" not in (root / "docs/networks.md").read_text()


def test_phases_that_were_measured_later_take_nothing_from_the_page() -> None:
    """They stand beside nothing else, so the batches and the README's table stay, each with its own commit."""
    batches = replace(LENET, workload="resnet18", problem="224_b32", batch=32)
    phases = replace(
        batches, workload="resnet18_phases", problem="224_b1", batch=1, rung="optimised", note="the engine",
        commit="def", date="2026-02-02T03:04:05+00:00",
    )  # fmt: skip
    page = network_pages.networks_page({"h200": [batches, phases]}, "h200")
    before, after = page.split("#### One image, phase by phase")
    assert "commit abc" in before and "| fp16 | 32 |" in before and "commit def" not in before
    assert "commit def" in after and "optimised" in after
    assert "| fp16 | 32 |" in network_pages.readme_block([batches, phases])
