"""Compiling ahead, in this process and in workers."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
import torch

from escalade.bench.verify import jobs, programs
from escalade.device.cache import default_cache
from escalade.device.precompile import precompile
from escalade.device.program import Program
from tests.bench.fake import SOURCE, Scale, rung

CPU = torch.device("cpu")


def test_programs_are_listed_once_and_a_raising_rung_is_left_out() -> None:
    operation = Scale(rung("one"), rung("same"), rung("other", slip=2.0), rung("broken", "raises"))
    found = programs(jobs(operation, CPU, configs="all"), "sm_90a")
    assert len(found) == 2


def test_rungs_of_other_architectures_are_left_out() -> None:
    assert programs(jobs(Scale(rung("one")), CPU), "sm_75") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_compiles_into_the_cache_and_reports_what_does_not_compile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    good = Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": 1.0})
    broken = Program.of(SOURCE, "scale", {"FAULT": 0})  # SLIP is missing
    more = [replace(good, constants=(("FAULT", n), ("SLIP", 1.0))) for n in (1, 2, 3)]
    seen: list[Program] = []
    failures = precompile([good, broken, *more], "sm_90a", workers, seen.append)
    assert len(seen) == 5
    assert [failure.program for failure in failures] == [broken] and "SLIP" in failures[0].message
    assert default_cache().size()[0] == 4
