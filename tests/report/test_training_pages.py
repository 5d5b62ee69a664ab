"""Steps of training in the documentation."""

from __future__ import annotations

from dataclasses import replace

from escalade.measure.records import Record
from escalade.report import gaps, training_pages

OURS = Record(
    "autoencoder_training_step", "32_b64", "fp16", "nhwc", 64, "escalade", "", timing="graph", median_us=300.0,
    wall_us=330.0, images_per_s=213333.0, error=1e-4, peak_bytes=64 << 20, gpu="NVIDIA H200", commit="abc",
    date="2026-01-03T03:04:05+00:00", command="escalade bench autoencoder --parts training-step",
)  # fmt: skip
GRAPH = replace(OURS, system="torch-graph", median_us=1200.0, wall_us=1230.0, peak_bytes=256 << 20)
COMPILED = replace(OURS, system="torch-compile-default", median_us=900.0, wall_us=930.0, peak_bytes=200 << 20)


def test_a_step_stands_beside_the_best_peer_by_both_clocks() -> None:
    text = training_pages.block([OURS, GRAPH, COMPILED, replace(OURS, batch=256)])
    assert "### autoencoder, 32² images, on an NVIDIA H200" in text
    assert "| fp16 | 64 | **300.0** | 1,200 | 900.0 | 3.00× | 213,333 | 1.0e-04 |" in text
    assert "| fp16 | 64 | **330.0** | 1,230 | 930.0 | 2.82× |" in text
    assert "| fp16 | 64 | 64.0 | 256.0 | 200.0 | 32% |" in text
    assert "| fp16 | 256 |" in text, "of another commit"
    rows = replace(OURS, workload="spectral_autoencoder_training_step", layout="flat", problem="320_b64")
    assert "### spectral_autoencoder, rows of 320, on an NVIDIA H200" in training_pages.block([rows])


def test_without_the_best_peer_there_is_no_ratio_and_a_gap() -> None:
    assert "not measured: torch-compile" in training_pages.block([OURS, GRAPH])
    text = gaps.block([OURS, GRAPH])
    assert "- **Training steps** of autoencoder: not measured: torch-compile (fp16 b64).\n" in text
    assert (
        "- **Training steps** without any record: resnet18, resnet34, resnet50, spectral_autoencoder.\n"
        in text
    )
    assert "**Training steps** of" not in gaps.block([OURS, GRAPH, COMPILED])
    assert "not been measured yet" in training_pages.block([])
