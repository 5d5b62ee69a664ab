"""Ratios over the best of all peers, and what is said where one of them was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escalade.bench.peers.comparison import against_best, by_clock, on_device
from escalade.measure.records import Record

OURS = Record(
    "resnet18", "224_b32", "fp16", "nhwc", 32, "escalade", "", timing="graph", median_us=250.0, wall_us=300.0
)
GRAPH = replace(OURS, system="torch-graph", median_us=850.0, wall_us=880.0)
COMPILE = replace(OURS, system="torch-compile", median_us=570.0, wall_us=660.0)
JAX = replace(OURS, system="jax", timing="calls", median_us=690.0, wall_us=750.0)


def test_the_best_of_all_peers_counts() -> None:
    found = against_best([OURS, GRAPH, COMPILE, JAX])
    assert found.ratio == pytest.approx(570 / 250) and found.peer == COMPILE and not found.why


@pytest.mark.parametrize("clock", [on_device, by_clock])
def test_without_torch_compile_there_is_no_ratio(clock: object) -> None:
    found = against_best([OURS, GRAPH, JAX], clock)  # type: ignore[arg-type]
    assert found.ratio is None and found.why == "not measured: torch-compile"


def test_a_peer_that_was_refused_was_not_measured() -> None:
    refused = replace(COMPILE, median_us=None, wall_us=None, failure="out of memory")
    assert against_best([OURS, GRAPH, refused]).why == "not measured: torch-compile"


def test_a_time_by_the_clock_is_never_divided_by_one_on_the_device() -> None:
    slow = replace(JAX, median_us=575.0)
    assert against_best([OURS, GRAPH, COMPILE, slow]).ratio == pytest.approx(570 / 250)
    fast = against_best([OURS, GRAPH, COMPILE, replace(JAX, median_us=500.0)])
    assert fast.ratio is None and fast.why == "jax is faster, and has no device time"


def test_calls_are_compared_with_calls_and_need_jax_for_a_resnet() -> None:
    found = against_best([OURS, GRAPH, replace(COMPILE, wall_us=760.0), JAX], by_clock)
    assert found.ratio == pytest.approx(2.5) and found.peer == JAX
    assert against_best([OURS, GRAPH, COMPILE], by_clock).why == "not measured: jax"
    small = [replace(r, workload="spectral_autoencoder", layout="flat") for r in (OURS, GRAPH, COMPILE)]
    assert against_best(small, by_clock).ratio == pytest.approx(2.2)


def test_a_layer_needs_torch_compile_and_with_an_epilogue_a_peer_that_fuses_it() -> None:
    ours = replace(OURS, workload="layers", problem="64to128_56_k1s2_b1_bias", rung="window")
    torch = replace(ours, system="torch-nhwc", rung="", median_us=600.0)
    assert against_best([ours, torch]).why == "no fused peer"
    fused = replace(torch, system="cudnn-graph", median_us=500.0)
    assert against_best([ours, torch, fused]).why == "not measured: torch-compile"
    compiled = replace(torch, system="torch-compile", median_us=550.0)
    assert against_best([ours, torch, fused, compiled]).ratio == pytest.approx(2.0)
    assert against_best([ours, torch, compiled]).ratio == pytest.approx(2.2)
    plain = [replace(r, problem="64to128_56_k1s2_b1") for r in (ours, torch, compiled)]
    assert against_best(plain[:2]).why == "not measured: torch-compile"
    assert against_best(plain).ratio == pytest.approx(2.2)
    in_fp8 = [replace(r, dtype="fp8") for r in (ours, fused)]
    assert against_best(in_fp8).ratio == pytest.approx(2.0), "torch.compile has no convolutions in FP8"
    gradient = [replace(r, workload="layers_weight_gradient") for r in (ours, torch)]
    assert against_best(gradient).ratio == pytest.approx(2.4), "torch.compile leaves them to PyTorch"


def test_without_ours_there_is_nothing_to_compare() -> None:
    found = against_best([GRAPH, COMPILE])
    assert found.ours is None and found.ratio is None and not found.why
