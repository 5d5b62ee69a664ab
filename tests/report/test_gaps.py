"""The list of what has not been measured."""

from __future__ import annotations

from dataclasses import replace

from escalade.measure.records import Record
from escalade.report import gaps

OURS = Record(
    "resnet18", "224_b8", "fp16", "nhwc", 8, "escalade", "", timing="graph", median_us=200.0, wall_us=240.0,
    gpu="NVIDIA H200", commit="abc", date="2026-01-03T03:04:05+00:00",
)  # fmt: skip


def test_without_records_nothing_is_listed() -> None:
    assert gaps.block([]) == "Nothing is recorded yet.\n"


def test_what_a_network_lacks_is_listed_and_what_it_has_is_not() -> None:
    graph, compiled, jax = (
        replace(OURS, system=system, median_us=400.0) for system in ("torch-graph", "torch-compile", "jax")
    )
    accuracy = replace(OURS, workload="resnet18_accuracy", median_us=None, wall_us=None)
    text = gaps.block([OURS, graph, accuracy])
    assert text.startswith("As of 2026-01-03")
    assert (
        "- **resnet18** at abc: not measured: torch-compile (fp16 b8); not measured: torch-compile, jax (fp16 b8); "
        "no phases, stream.\n" in text
    )
    assert (
        "**Networks** without any record: resnet34, resnet50, autoencoder, lenet, spectral_autoencoder."
        in text
    )
    more = [replace(OURS, workload=f"resnet18_{part}") for part in ("phases", "stream")]
    assert "**resnet18**" not in gaps.block([OURS, graph, compiled, jax, accuracy, *more])


def test_layers_without_a_peer_and_ladders_without_a_record_are_listed() -> None:
    layer = replace(OURS, workload="layers", problem="64to128_56_k1s2_b8_bias", rung="window")
    torch = replace(layer, system="torch-nhwc", rung="")
    text = gaps.block([layer, torch])
    assert "- **Layers**, forward: no fused peer (1 of 1)" in text
    assert "- **Layers**, input gradient: none." in text
    assert "**Ladders** without any record: conv2d" in text
