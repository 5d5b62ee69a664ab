"""Preparations for a plan's kernels before any of them is built."""

from __future__ import annotations

import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from escalade.device import precompilation
from escalade.device.nvrtc import is_compiled
from escalade.device.program import Program
from escalade.engine import compile
from escalade.engine.plan import kernels
from tests.bench.fake import SOURCE


def test_kernels_compiled_for_a_plan_are_loaded_and_failures_are_left_to_their_steps(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "architecture_of", lambda device: "sm_90a")
    loaded: list[tuple[Program, int]] = []

    def load(program: Program, index: int) -> None:
        assert is_compiled(program, "sm_90a")
        loaded.append((program, index))

    monkeypatch.setattr(kernels, "load", load)
    one, other = (Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": slip}) for slip in (1.0, 2.0))
    broken = Program.of(SOURCE, "scale", {"FAULT": 0})  # SLIP is undefined
    plan: Any = SimpleNamespace(programs=(one, broken, other, one))
    kernels.compile_plans([plan], torch.device("cuda", 3))
    assert len(loaded) == 2 and {*loaded} == {(one, 3), (other, 3)}


def test_long_builds_for_the_twin_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = compile(nn.Linear(4, 4), torch.randn(2, 4), device="twin")
    plan = engine.plan(torch.randn(2, 4))
    kernels.compile_plans([plan], torch.device("cpu"))
    assert "building" not in caplog.text
    monkeypatch.setattr(precompilation, "_TWIN_SECONDS", 3600.0)
    monkeypatch.setattr(precompilation, "is_built", lambda *_: False)
    kernels.compile_plans([plan], torch.device("cpu"))
    assert re.search(r"building 1 kernel for the twin, about (\d+ min|[\d.]+ h|\d+ s); later", caplog.text)
