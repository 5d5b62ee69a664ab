"""Every peer that is made somewhere is described, and every one that is described is made or says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.bench.networks.workloads import WORKLOADS
from escalade.bench.peers import registry
from escalade.bench.peers.catalogue import PEERS, SLOW, TITLES, Package, Peer
from escalade.measure.records import Record
from escalade.ops import OPERATIONS
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.report.pages.records import peers


def test_whoever_is_made_is_described() -> None:
    fused = Conv2dProblem.parse("8to8_9_k3s1_b1_bias+relu", "fp16", "nhwc")
    made = {*registry.LAYERS, *registry.NETWORKS}
    made |= {name for workload in WORKLOADS.values() for name in workload.peers}
    for operation in OPERATIONS.values():
        problem = fused if operation.name == "conv2d" else operation.problems[0]
        made |= {peer.system for peer in registry.operator_peers(operation, problem)}
    assert made <= set(TITLES)
    assert {system for peer in PEERS for system in peer.systems} <= made
    assert set(SLOW) == {registry.COMPILE, registry.COMPILE_DEFAULT, "triton", *registry.EXPORTED}


def test_what_is_missing_is_said_with_how_it_is_brought() -> None:
    absent = Peer("Nobody", ("nobody",), "nothing", "none", (Package("escalade_absent", "pip install it"),))
    assert absent.refusal == "needs the package escalade_absent, which is not installed: pip install it"
    assert not replace(absent, needs=(Package("escalade", ""),)).refusal


def test_the_docs_say_how_often_a_peer_was_measured_or_why_it_was_not() -> None:
    timed = Record("resnet18", "224_b1", "fp16", "nhwc", 1, "jax", "", median_us=1.0)
    refused = replace(timed, median_us=None, failure="jax is not here\nand more")
    rows = {line.split(" | ")[0]: line for line in peers([timed, refused]).markdown().splitlines()}
    assert rows["| JAX"].endswith("| times measured: 1; refused 1 times, 1 of them: jax is not here |")
    assert rows["| PyTorch eager"].endswith("| not yet |")


def test_a_ladder_stands_beside_the_compiler_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def compile(call: Any, mode: str, dynamic: bool) -> Any:
        asked.append(mode)
        return call

    monkeypatch.setattr(torch, "compile", compile)
    operation = OPERATIONS["relu"]
    problem = operation.small_problems[0]
    *plain, compiled = registry.operator_peers(operation, problem, compiled=True)
    assert registry.operator_peers(operation, problem) == tuple(plain)
    assert (compiled.system, compiled.layout) == (registry.COMPILE, "flat")
    inputs = operation.inputs(problem, torch.device("cpu"), seed=0)
    for _ in range(2):
        assert torch.equal(compiled.run(problem, inputs), operation.peer(problem, inputs))
    assert asked == ["max-autotune-no-cudagraphs"]
    fp8 = Conv2dProblem.parse("16to16_9_k3s1_b1", "fp8", "nhwc")
    assert registry.operator_peers(OPERATIONS["conv2d"], fp8, compiled=True) == ()
