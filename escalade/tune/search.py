"""Search for the fastest config: all configs of the preferred rungs are verified and timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.packing import PreparedRecipe
from escalade.device.program import Program
from escalade.device.timing import ResultCheck, Subject, time_interleaved
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.choice import configs_for_any_caller
from escalade.ops.choose.table import Entry
from escalade.tune.samples import Sample
from escalade.tune.verification import VerificationCase, compare_all, outputs_of, poison

SCREENING_SECONDS = 0.004
"""Seconds per candidate in the first pass; `FINAL_SECONDS` in the second, of the `_FINALISTS` fastest."""
FINAL_SECONDS = 0.05
_FINALISTS = 4
MAX_ESTIMATE_RATIO = 4.0
"""Candidates estimated at more than this multiple of the lowest estimate are not measured."""


@dataclass(frozen=True)
class Candidate:
    rung: Rung[Any]
    config: Config

    @property
    def name(self) -> str:
        return f"{self.rung.name} {self.config}"


def candidates(operation: Operation[Any], problem: Problem, card: Card) -> list[Candidate]:
    """Return the configs of the preferred rungs that support the problem in its layout, without hopeless ones.

    A rung with one thread per output can take a thousand times as long as tensor cores.
    """
    found: list[tuple[Candidate, float | None]] = []
    least = math.inf
    for name in dict.fromkeys(operation.preferred(problem)):
        rung = operation.ladder.rung(name).on(card)
        if rung.refusal(problem) is not None or rung.least(problem) > MAX_ESTIMATE_RATIO * least:
            continue
        for config in configs_for_any_caller(rung, problem):
            us = rung.estimate(problem, config)
            found.append((Candidate(rung, config), us))
            least = min(least, math.inf if us is None else us)
    return [candidate for candidate, us in found if us is None or us <= MAX_ESTIMATE_RATIO * least]


def programs(operation: Operation[Any], problems: Iterable[Problem], card: Card) -> list[Program]:
    """Return the programs that tuning these problems compiles."""
    return list(
        dict.fromkeys(
            program
            for problem in problems
            for candidate in candidates(operation, problem, card)
            for program in candidate.rung.recipe(problem, candidate.config).programs
        )
    )


def fastest(operation: Operation[Any], problem: Problem, device: torch.device, seed: int = 0) -> Entry:
    """Find the fastest rung and config under the conditions of a network.

    Inputs stay in the L2 where the previous step left them, and launches follow each other. Weight packing is not
    timed: a plan does it once.
    """
    offered = candidates(operation, problem, Card.of(device))
    trial = Trial(operation, problem, device, offered, seed)
    final = trial.time(finalists(trial.time(trial.right, SCREENING_SECONDS)), FINAL_SECONDS)
    if not final:
        raise trial.nothing()
    winner = min(final, key=lambda name: final[name])
    chosen = next(candidate for candidate in offered if candidate.name == winner)
    return Entry(chosen.rung.name, chosen.config.as_dict(), round(final[winner], 3))


def finalists(times: Mapping[str, float]) -> list[str]:
    """Return the fastest candidates of the first pass."""
    return sorted(times, key=lambda name: times[name])[:_FINALISTS]


def samples(operation: Operation[Any], problem: Problem, device: torch.device, seed: int = 0) -> list[Sample]:
    """Time every candidate in one short pass."""
    card = Card.of(device)
    offered = candidates(operation, problem, card)
    trial = Trial(operation, problem, device, offered, seed)
    times = trial.time(trial.right, SCREENING_SECONDS)
    return [
        Sample(
            operation.name, problem.name, problem.dtype, problem.layout, card.architecture or "", candidate.rung.name,
            candidate.config.as_dict(), round(times[candidate.name], 3) if candidate.name in times else None,
            trial.failures.get(candidate.name, ""), len(offered),
        )
        for candidate in offered
    ]  # fmt: skip


class Trial:
    """Verified candidates of one problem. Those with right results can be timed; timing verifies them again."""

    def __init__(
        self,
        operation: Operation[Any],
        problem: Problem,
        device: torch.device,
        offered: Sequence[Candidate],
        seed: int,
    ) -> None:
        case = VerificationCase(operation, problem, device, seed)
        outputs = outputs_of(operation, problem, device)
        tensors = {**case.inputs_in(problem.layout), **outputs}
        self.failures: dict[str, str] = {}
        self._label = f"{operation.name} {problem.name}"
        self._device = device
        self._subjects: dict[str, Subject] = {}
        for candidate in offered:
            try:
                outcome = case.check(candidate.rung, problem.layout, candidate.config)
                if outcome.failed:
                    self.failures[candidate.name] = outcome.failure
                    continue
                assert outcome.tolerance is not None
                proof = _proof(outputs, {"y": case.expected, **case.further}, outcome.tolerance)
                self._subjects[candidate.name] = _subject(
                    candidate, problem, tensors, device, not operation.weights_change, proof
                )
            except CompileError as error:
                self.failures[candidate.name] = str(error)

    @property
    def right(self) -> list[str]:
        return list(self._subjects)

    def nothing(self) -> UnsupportedError:
        """Return the error for a problem without any working candidate."""
        failures = "; ".join(f"{name}: {failure}" for name, failure in self.failures.items())
        return UnsupportedError(f"no rung computes {self._label}: {failures}")

    def time(self, names: Sequence[str], seconds: float) -> dict[str, float]:
        """Return microseconds by name. Candidates with wrong results are moved to `failures`."""
        wrong: dict[str, str] = {}
        timings = time_interleaved(
            [self._subjects[name] for name in names],
            self._device,
            seconds_each=seconds,
            min_rounds=3,
            replay_us=200.0,
            wrong=wrong,
        )
        for name, failure in wrong.items():
            self.failures[name] = failure
            del self._subjects[name]
        return {name: timing.median_us for name, timing in timings.items()}


def _proof(
    outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> ResultCheck:
    def spoil() -> None:
        for output in outputs.values():
            poison(output)

    return ResultCheck(spoil, lambda: compare_all(outputs, expected, tolerance))


def _subject(
    candidate: Candidate,
    problem: Problem,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    weights_are_constant: bool,
    proof: ResultCheck,
) -> Subject:
    """Return a subject that runs as in a network: constant weights are packed once."""
    recipe = candidate.rung.recipe(problem, candidate.config)
    prepared = PreparedRecipe(
        recipe, device, candidate.name, weights_are_constant=weights_are_constant, behind=recipe
    )
    return Subject(candidate.name, [prepared.bind(tensors)], proof)
