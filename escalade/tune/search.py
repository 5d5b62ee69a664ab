"""Filling a table: every config of the preferred rungs, verified and then timed, the fastest kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade import ops
from escalade.bench.timing import Arm, time_interleaved
from escalade.bench.verify import Case
from escalade.device.cuda import architecture_of
from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.device.run import Executable
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.ladder import Config, Problem, Rung
from escalade.tune.table import Entry

SCREENING_SECONDS = 0.004
"""For each candidate of the first pass."""
FINAL_SECONDS = 0.05
_FINALISTS = 4


@dataclass(frozen=True)
class Candidate:
    rung: Rung[Any]
    config: Config

    @property
    def name(self) -> str:
        return f"{self.rung.name} {self.config}"


def candidates(operation: str, problem: Problem, architecture: str | None) -> list[Candidate]:
    """Every config of every preferred rung that takes the problem as it is."""
    asked = ops.operation(operation)
    found = []
    for name in dict.fromkeys(asked.preferred(problem)):
        rung = asked.ladder.rung(name)
        if rung.refusal(problem, architecture) is None:
            found += [Candidate(rung, config) for config in rung.configs(problem)]
    return found


def programs(operation: str, problems: Iterable[Problem], architecture: str | None) -> list[Program]:
    """What tuning these problems compiles."""
    return list(
        dict.fromkeys(
            program
            for problem in problems
            for candidate in candidates(operation, problem, architecture)
            for program in candidate.rung.recipe(problem, candidate.config).programs
        )
    )


def fastest(operation: str, problem: Problem, device: torch.device, seed: int = 0) -> Entry:
    """By time in a network: inputs where the step before left them, launches that follow each other.

    Steps that only pack weights are not part of it: a plan does them once.
    """
    asked = ops.operation(operation)
    case = Case(asked, problem, device, seed)
    inputs = case.inputs_in(problem.layout)
    output = asked.output(problem, device)
    arms: dict[str, tuple[Candidate, Arm]] = {}
    failures = []
    for candidate in candidates(operation, problem, architecture_of(device)):
        try:
            outcome = case.check(candidate.rung, problem.layout, candidate.config)
            if outcome.failed:
                failures.append(f"{candidate.name}: {outcome.failure}")
                continue
            arms[candidate.name] = candidate, _arm(candidate, problem, {**inputs, "y": output}, device)
        except CompileError as error:
            failures.append(f"{candidate.name}: {error}")
    if not arms:
        raise UnsupportedError(f"nothing that {operation} has does {problem.name}: {'; '.join(failures)}")
    times = _time([arm for _, arm in arms.values()], device, SCREENING_SECONDS)
    best = sorted(times, key=lambda name: times[name])[:_FINALISTS]
    final = _time([arms[name][1] for name in best], device, FINAL_SECONDS)
    winner = min(final, key=lambda name: final[name])
    chosen = arms[winner][0]
    return Entry(chosen.rung.name, chosen.config.as_dict(), round(final[winner], 3))


def _arm(
    candidate: Candidate, problem: Problem, tensors: dict[str, torch.Tensor], device: torch.device
) -> Arm:
    recipe = candidate.rung.recipe(problem, candidate.config)
    bound = {**tensors, **{w.name: w.allocate(device) for w in recipe.workspaces}}
    bound |= {name: None for name in ("bias", "residual") if name not in bound}  # type: ignore[misc]
    once = tuple(step for step in recipe.steps if step.weights_only)
    each = tuple(step for step in recipe.steps if not step.weights_only)
    if once:
        Executable(Recipe(once, recipe.workspaces), device, candidate.name).bind(bound)()
    return Arm(
        candidate.name, [Executable(Recipe(each, recipe.workspaces), device, candidate.name).bind(bound)]
    )


def _time(arms: Sequence[Arm], device: torch.device, seconds: float) -> dict[str, float]:
    timings = time_interleaved(arms, device, seconds_per_arm=seconds, min_rounds=3, replay_us=200.0)
    return {name: timing.median_us for name, timing in timings.items()}
