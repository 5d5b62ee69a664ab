"""Rungs of an operation on one problem, counted in one run of Nsight Compute: the bytes that each really moves."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from escalade import ops, parsing
from escalade.errors import UnsupportedError
from escalade.measure.ceilings import Ceilings
from escalade.measure.records import Record
from escalade.ops.choose.choice import Choice, choose
from escalade.profile import ncu
from escalade.profile.counters import Counters
from escalade.profile.parts import Target
from escalade.profile.profiles import Profile, Profiled, counted
from escalade.profile.targets import of_rung

SUFFIX = "_traffic"
"""How the workload of these records ends, behind the operation's name."""


@dataclass(frozen=True)
class Climb:
    """Rungs from the foot up, on a problem in one dtype."""

    operation: str
    problem: str
    dtype: str
    rungs: list[str]
    seed: int = 0

    def choices(self, device: torch.device) -> list[Choice]:
        """Each rung with its config, in the layout of the one before if it takes that, else in another."""
        operation = ops.operation(self.operation)
        asked: Any = replace(operation.parse(self.problem), dtype=self.dtype)
        found: list[Choice] = []
        for rung in self.rungs:
            before = [found[-1].problem.layout] if found else []
            found.append(_first(operation, asked, rung, (*before, *operation.layouts), device))
        return found


def _first(operation: Any, problem: Any, rung: str, layouts: Sequence[str], device: torch.device) -> Choice:
    refusal: UnsupportedError | None = None
    for layout in dict.fromkeys(layouts):
        try:
            return choose(operation, replace(problem, layout=layout), device, rung)
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def target_of(climb: Climb, device: torch.device) -> Target:
    """All rungs one after another, each over tensors of its own."""
    operation = ops.operation(climb.operation)
    rungs = [
        of_rung(operation, one.problem, one.rung, one.config, device, climb.seed)
        for one in climb.choices(device)
    ]
    title = f"{climb.operation} {climb.problem} {climb.dtype}"
    return Target(title, device, lambda: itertools.chain.from_iterable(rung.pieces() for rung in rungs))


def launch() -> None:
    """What a process of its own does under Nsight Compute."""
    climb = parsing.typed(Climb, parsing.parse(sys.argv[1]))
    ncu.launch(lambda: target_of(climb, torch.device("cuda")))


def measure(climb: Climb, device: torch.device, ceilings: Ceilings) -> tuple[Profile, list[Record]]:
    """The profile, and a record of every rung; where there are no counters it is said why."""
    program = ncu.find()
    if program is None:
        raise ncu.NoCounters("Nsight Compute (ncu) is not here, and bytes are counted by it")
    asked = json.dumps(asdict(climb))
    title, parts, readings = ncu.profiled(program, f"{launch.__module__}.{launch.__name__}", asked)
    found = counted(title, parts, readings, ceilings)
    return found, records(climb, climb.choices(device), found, ceilings)


def records(climb: Climb, choices: Sequence[Choice], found: Profile, ceilings: Ceilings) -> list[Record]:
    """A record of each rung: its time under the profiler, and what it moved meanwhile."""
    return [_record(climb, choice, part, ceilings) for choice, part in zip(choices, found.parts, strict=True)]


def _record(climb: Climb, choice: Choice, found: Profiled, ceilings: Ceilings) -> Record:
    problem, us = choice.problem, found.us
    longest = max(found.kernels, key=lambda one: one.us or 0.0)
    tflops = problem.flops / us / 1e6
    return Record(
        climb.operation + SUFFIX, problem.name, problem.dtype, problem.layout, problem.batch, "escalade",
        choice.rung.name, timing="ncu", median_us=us, samples=1, tflops=tflops,
        peak_pct=100 * tflops / ceilings.tflops[problem.dtype], gbps=problem.bytes / us / 1e3,
        floor_us=found.floor_us, note=found.words,
        config={
            "fewest_bytes": problem.bytes,
            "moved_bytes": _sum(found.kernels, "dram_bytes"),
            "l2_bytes": _sum(found.kernels, "l2_bytes"),
            "dram_pct": longest.dram_pct,
            "tensor_pct": longest.tensor_pct,
            "issue_pct": longest.issue_pct,
        },
    )  # fmt: skip


def _sum(kernels: Sequence[Counters], name: str) -> float | None:
    """Over all kernels of a rung; None if one was not counted."""
    values = [getattr(one, name) for one in kernels]
    return None if None in values else sum(values)
