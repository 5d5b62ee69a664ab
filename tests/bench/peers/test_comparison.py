"""Our speed relative to the best of all peers, always shown, with a note if a peer is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import against_best, by_clock

OURS = Record(
    "resnet18", "224_b32", "fp16", "nhwc", 32, "escalade", "", timing="graph", median_us=250.0, wall_us=300.0,
    versions={"torch": "2.11", "cuda": "13.0", "cudnn": "9"}, commit="new",
)  # fmt: skip
GRAPH = replace(OURS, system="torch-graph", median_us=850.0, wall_us=880.0)
COMPILE = replace(OURS, system="torch-compile", median_us=570.0, wall_us=660.0)
JAX = replace(OURS, system="jax", timing="calls", median_us=690.0, wall_us=600.0)


def test_the_best_of_all_peers_counts_whatever_its_commit() -> None:
    found = against_best([OURS, GRAPH, replace(COMPILE, commit="old"), JAX])
    assert found.ratio == pytest.approx(570 / 250) and found.peer and found.peer.system == "torch-compile"
    assert not found.note


def test_a_ratio_below_one_is_a_ratio() -> None:
    found = against_best([OURS, replace(COMPILE, median_us=200.0), GRAPH])
    assert found.ratio == pytest.approx(0.8) and not found.note


def test_one_peer_is_enough_and_the_note_names_what_is_missing() -> None:
    found = against_best([OURS, GRAPH, replace(COMPILE, median_us=None, wall_us=None, failure="no memory")])
    assert found.ratio == pytest.approx(3.4) and found.peer == GRAPH and found.note == "no torch.compile"
    assert against_best([OURS]).ratio is None and against_best([OURS]).note == "no peer"
    found = against_best([GRAPH, COMPILE])
    assert found.ours is None and found.ratio is None and found.peer == COMPILE


def test_peers_of_other_versions_count_only_if_there_are_no_others() -> None:
    other = replace(COMPILE, median_us=100.0, versions={**COMPILE.versions, "torch": "2.10"})
    assert against_best([OURS, GRAPH, other]).peer == GRAPH
    alone = against_best([OURS, other])
    assert alone.ratio == pytest.approx(0.4) and "peer's PyTorch is 2.10" in alone.note


def test_calls_in_a_row_that_beat_all_device_times_are_the_best_peer() -> None:
    fast = replace(JAX, median_us=500.0)
    found = against_best([OURS, GRAPH, COMPILE, fast])
    assert found.peer == fast and found.ratio == pytest.approx(2.0)
    assert found.note == "at most: jax is timed by the clock, calls in a row"
    slow = against_best([OURS, GRAPH, COMPILE, replace(JAX, median_us=600.0)])
    assert slow.peer == COMPILE and slow.ratio == pytest.approx(570 / 250) and not slow.note
    assert against_best([OURS, fast]).ratio is None
    found = against_best([OURS, GRAPH, COMPILE, fast], by_clock)
    assert found.ratio == pytest.approx(2.0) and found.peer == fast and not found.note


def test_layers_say_which_kind_of_peer_they_lack() -> None:
    ours = replace(OURS, workload="layers", problem="64to128_56_k1s2_b1_bias", rung="window")
    torch = replace(ours, system="torch-nhwc", rung="", median_us=200.0)
    found = against_best([ours, torch])
    assert found.ratio == pytest.approx(0.8) and found.note == "no fused peer"
    fused = replace(torch, system="cudnn-graph", median_us=500.0)
    assert against_best([ours, torch, fused]).note == "no torch.compile"
    assert not against_best([ours, replace(torch, system="torch-compile")]).note
    assert not against_best([replace(r, dtype="fp8") for r in (ours, fused)]).note
    assert not against_best([replace(r, workload="layers_weight_gradient") for r in (ours, torch)]).note
