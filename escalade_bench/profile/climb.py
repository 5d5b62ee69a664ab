"""Rungs of an operation on one problem, counted in one run of Nsight Compute: the bytes that each moves."""

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
from escalade.ops.base.card import DeviceOrCard
from escalade.ops.choose.choice import Choice, choose
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record
from escalade_bench.profile import ncu
from escalade_bench.profile.profiles import Profile, Profiled, profile
from escalade_bench.profile.target import Target, of_rung

SUFFIX = "_traffic"
"""Suffix of the workload of these records, after the operation's name."""


@dataclass(frozen=True)
class Climb:
    """Rungs in ascending order, on a problem in one dtype."""

    operation: str
    problem: str
    dtype: str
    rungs: list[str]
    seed: int = 0

    def choices(self, device: DeviceOrCard) -> list[Choice]:
        """Choose a config per rung, in the layout of the rung before if possible, else in another."""
        operation = ops.operation(self.operation)
        asked: Any = replace(operation.parse(self.problem), dtype=self.dtype)
        found: list[Choice] = []
        for rung in self.rungs:
            layouts = (*(one.problem.layout for one in found[-1:]), *operation.layouts)
            found.append(first_choice(self.operation, asked, [self.dtype], layouts, device, rung))
        return found


def first_choice(
    operation: str,
    problem: Any,
    dtypes: Sequence[str],
    layouts: Sequence[str],
    device: DeviceOrCard,
    rung: str | None,
) -> Choice:
    """Choose a rung and config for the first dtype and layout that it supports; else raise its first refusal."""
    known, refusal = ops.operation(operation), None
    for dtype, layout in dict.fromkeys(itertools.product(dtypes, layouts)):
        try:
            return choose(known, replace(problem, dtype=dtype, layout=layout), device, rung)
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def target_of(climb: Climb, device: torch.device) -> Target:
    """All rungs one after another, each over its own tensors."""
    operation = ops.operation(climb.operation)
    rungs = [of_rung(operation, one, device, climb.seed) for one in climb.choices(device)]
    title = f"{climb.operation} {climb.problem} {climb.dtype}"
    return Target(title, device, lambda: itertools.chain.from_iterable(rung.pieces() for rung in rungs))


def launch() -> None:
    """Entry point of the process under Nsight Compute."""
    climb = parsing.parse_dataclass(Climb, parsing.parse(sys.argv[1]))
    ncu.launch(lambda: target_of(climb, torch.device("cuda")))


def measure(climb: Climb, device: torch.device, ceilings: Ceilings) -> tuple[Profile, list[Record]]:
    """Return the profile and a record of every rung; raise `NoCounters` if counters cannot be read."""
    program = ncu.find()
    if program is None:
        raise ncu.NoCounters("Nsight Compute (ncu) is not installed; it counts the bytes")
    title, parts, launches = ncu.profiled(program, launch, json.dumps(asdict(climb)))
    found = profile(title, ncu.HOW, parts, launches, ceilings)
    return found, records(climb, climb.choices(device), found, ceilings)


def records(climb: Climb, choices: Sequence[Choice], found: Profile, ceilings: Ceilings) -> list[Record]:
    """Return a record per rung: its time under the profiler and the bytes that it moved."""
    return [_record(climb, choice, part, ceilings) for choice, part in zip(choices, found.parts, strict=True)]


def _record(climb: Climb, choice: Choice, found: Profiled, ceilings: Ceilings) -> Record:
    problem, us = choice.problem, found.us
    longest = max(found.kernels, key=lambda one: one.us or 0.0)
    tflops = problem.flops / us / 1e6

    def total(name: str) -> float | None:
        values = [getattr(one, name) for one in found.kernels]
        return None if None in values else sum(values)

    return Record(
        climb.operation + SUFFIX, problem.name, problem.dtype, problem.layout, problem.batch, "escalade",
        choice.rung.name, timing="ncu", median_us=us, samples=1, tflops=tflops,
        peak_pct=100 * tflops / ceilings.peak(problem.dtype), gbps=problem.bytes / us / 1e3,
        floor_us=found.floor_us, note=found.words,
        config={
            "fewest_bytes": problem.bytes,
            "moved_bytes": total("dram_bytes"),
            "l2_bytes": total("l2_bytes"),
            "dram_pct": longest.dram_pct,
            "tensor_pct": longest.tensor_pct,
            "issue_pct": longest.issue_pct,
        },
    )  # fmt: skip
