"""The table of peers: some benchmark uses every system in it, and missing packages are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade_bench.measure.records import Record
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers import registry
from escalade_bench.peers.layer import operator_peers
from escalade_bench.peers.registry import PEERS, SLOW, TITLES, Peer
from escalade_bench.report.pages.records import peers


def test_every_system_that_is_made_is_in_the_table() -> None:
    fused = Conv2dProblem.parse("8to8_9_k3s1_b1_bias+relu", "fp16", "nhwc")
    made = {*registry.LAYERS, *registry.NETWORKS}
    made |= {name for workload in WORKLOADS.values() for name in workload.peers}
    for operation in OPERATIONS.values():
        problem = fused if operation.name == "conv2d" else operation.problems[0]
        made |= {peer.system for peer in operator_peers(operation, problem)}
    assert made <= set(TITLES)
    assert {system for peer in PEERS for system in peer.systems} <= made
    assert set(SLOW) == {registry.COMPILE, registry.COMPILE_DEFAULT}


def test_a_missing_package_is_reported_with_its_install_command() -> None:
    absent = Peer("Absent", ("absent",), "nothing", "none", {"escalade_absent": "pip install it"})
    assert absent.refusal == "needs the package escalade_absent, which is not installed: pip install it"
    assert not replace(absent, needs={"escalade": ""}).refusal


def test_the_docs_count_the_measurements_of_a_peer_and_its_refusals() -> None:
    timed = Record("resnet18", "224_b1", "fp16", "nhwc", 1, "jax", "", median_us=1.0)
    refused = replace(timed, median_us=None, failure="jax is not here\nand more")
    rows = {line.split(" | ")[0]: line for line in peers([timed, refused]).markdown().splitlines()}
    assert rows["| JAX"].endswith("| times measured: 1; refused 1 times, 1 of them: jax is not here |")
    assert rows["| PyTorch eager"].endswith("| not yet |")


def test_a_ladder_is_compared_with_the_compiler_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def compile(call: Any, mode: str, **options: Any) -> Any:
        asked.append(mode)
        return call

    monkeypatch.setattr(torch, "compile", compile)
    operation = OPERATIONS["relu"]
    problem = operation.small_problems[0]
    *plain, compiled = operator_peers(operation, problem, compiled=True)
    assert operator_peers(operation, problem) == tuple(plain)
    assert (compiled.system, compiled.layout) == (registry.COMPILE, "flat")
    inputs = operation.inputs(problem, torch.device("cpu"), seed=0)
    for _ in range(2):
        assert torch.equal(compiled.run(problem, inputs), operation.peer(problem, inputs))
    assert asked == ["max-autotune-no-cudagraphs"]
    fp8 = Conv2dProblem.parse("16to16_9_k3s1_b1", "fp8", "nhwc")
    assert operator_peers(OPERATIONS["conv2d"], fp8, compiled=True) == ()
