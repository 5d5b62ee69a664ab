"""Profiles on a GPU: counters where Nsight Compute may read them, times where not."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from escalade import subprocesses
from escalade_bench.measure.records import load
from escalade_bench.profile import ncu
from tests.commands.support import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Nsight Compute hangs, counters are skipped, and the other tests continue."""
    monkeypatch.setattr(ncu, "SECONDS", 60.0)


def test_a_network_is_timed_step_by_step_and_traced(cuda: torch.device, tmp_path: pathlib.Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "profile.json"
    result = run(
        *("profile", "lenet", "--batch", "4", "--no-counters", "--trace", str(trace), "--json", str(out))
    )
    assert result.exit_code == 0, result.output
    parts = json.loads(out.read_text())["parts"]
    assert all(kernel["us"] > 0 for part in parts for kernel in part["kernels"])
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {part["part"]["name"] for part in parts if part["part"]["kernels"]} <= names


def test_counters_agree_with_the_bytes_of_a_copy(cuda: torch.device, tmp_path: pathlib.Path) -> None:
    if ncu.find() is None:
        pytest.skip("needs ncu")
    out = tmp_path / "profile.json"
    result = run("profile", "relu", "--dtype", "fp32", "--json", str(out))
    assert result.exit_code == 0, result.output
    if "no counters" in result.output:
        pytest.skip(result.output)
    (part,) = json.loads(out.read_text())["parts"]
    (kernel,) = part["kernels"]
    must = part["part"]["bytes"] / 2
    assert 0.9 * must < kernel["dram_read_bytes"] < 1.5 * must, "a relu reads as much as it writes"
    assert kernel["us"] > 0 and kernel["registers"] and kernel["load_sectors"] >= 4
    assert part["words"] and kernel["stalls"]


def test_the_twin_and_the_card_count_the_same(cuda: torch.device, tmp_path: pathlib.Path) -> None:
    if ncu.find() is None or subprocesses.find_program("g++") is None:
        pytest.skip("needs ncu, and g++ for the twin")
    rung = ("conv2d", "--problem", "16to16_14_k3s1_b2", "--rung", "padded_tile", "--dtype", "fp32")
    result = run("profile", *rung, "--beside-twin", "--results", str(tmp_path))
    if "without counters" in str(result.exception):
        pytest.skip(result.output)
    assert result.exit_code == 0, result.output
    (record,) = load(next(tmp_path.rglob("conv2d_counts.jsonl")))
    assert record.counts["global_load_requests"] > 0 and "counts agree within" in record.note
    close, _, _ = record.note.partition(" counts")[0].partition(" of ")
    assert int(close) >= 4, result.output
