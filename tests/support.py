"""Helpers of tests: the rungs, problems of each that are worth a run, and work in several threads."""

from __future__ import annotations

import datetime
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from escalade.device.run import TwinOptions
from escalade.ops import OPERATIONS, Config, Operation, Rung
from escalade.ops.base.card import TWIN
from escalade.tune.verification import VerificationCase

T = TypeVar("T")
MEDIUM_BATCH = 8
SHARE = 8
"""One in this many problems runs with each rung; `make test-slice` draws from the others."""
TINY = replace(TWIN, multiprocessors=1)
"""A card with one SM, whose CTAs loop over all tiles."""


def all_rungs() -> list[tuple[Operation[Any], Rung[Any]]]:
    return [(operation, rung) for operation in OPERATIONS.values() for rung in operation.ladder]


@cache  # a problem is checked when it is made
def variants(operation: Operation[Any], problem: Any) -> list[Any]:
    """The problem in every dtype and layout."""
    return [
        replace(problem, dtype=dtype, layout=layout)
        for dtype in operation.dtypes
        for layout in operation.layouts
    ]


def with_batch(problem: Any, batch: int) -> Any:
    """The same problem for this many images; a gradient's problem changes the forward problem."""
    names = [field.name for field in fields(problem)]
    if "batch" in names:
        return replace(problem, batch=batch)
    changed = {
        name: with_batch(getattr(problem, name), batch)
        for name in names
        if is_dataclass(getattr(problem, name)) and hasattr(getattr(problem, name), "batch")
    }
    assert changed, f"{type(problem).__name__} has a batch, but neither it nor a part of it has the field"
    return replace(problem, **changed)


def medium_problems(operation: Operation[Any]) -> list[Any]:
    """The measured problems, with batch sizes that are quick for a float64 reference."""
    return [with_batch(problem, min(problem.batch, MEDIUM_BATCH)) for problem in operation.problems]


def supported(operation: Operation[Any], rung: Rung[Any], problems: Iterable[Any]) -> list[list[Any]]:
    """For each problem that the rung supports at all, its supported variants."""
    every = [
        [variant for variant, refusal in refusals(operation.name, rung.name, problem) if refusal is None]
        for problem in problems
    ]
    return [offered for offered in every if offered]


@cache
def refusals(operation: str, rung: str, problem: Any) -> list[tuple[Any, str | None]]:
    """Each variant of a problem, with the rung's refusal. Cached per process: some rungs search all
    their tiles for an answer."""
    asked = OPERATIONS[operation].ladder.rung(rung)
    return [(variant, asked.supports(variant)) for variant in variants(OPERATIONS[operation], problem)]


def cover(
    operation: Operation[Any], rung: Rung[Any], problems: Iterable[Any], turn: int, share: int = 1
) -> list[Any]:
    """Each problem once, and each dtype in each layout at least once, spread over the problems.

    `turn` shifts the assignment, so that rungs get a problem in different dtypes. With a `share`, only
    one in `share` problems, others for the next rung; each dtype and each layout, but not all pairs of them; and
    only one of the two 16-bit dtypes, whose kernels are alike.
    """
    every = supported(operation, rung, problems)
    if share > 1:
        every = [_without_twin(variants, ("fp16", "bf16")[turn % 2]) for variants in every]
    each = every[turn % max(1, min(share, len(every))) :: share]
    rounds = max(len(each), max((len(variants) for variants in each), default=0) if share == 1 else 0)
    chosen = []
    for number in range(rounds):
        offered = each[number % len(each)]
        chosen.append(offered[(number + turn // share) % len(offered)])
    others = {(variant.dtype, variant.layout): variant for offered in every for variant in offered}
    for number in range(len(others)):
        (dtype, layout), variant = list(others.items())[(number + turn) % len(others)]
        pairs = {(problem.dtype, problem.layout) for problem in chosen}
        dtypes, layouts = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
        if (dtype, layout) not in pairs if share == 1 else dtype not in dtypes or layout not in layouts:
            chosen.append(variant)
    return list(dict.fromkeys(chosen))


def _without_twin(variants: list[Any], dtype: str) -> list[Any]:
    """Variants of a problem in dtypes other than this one, if any."""
    return [variant for variant in variants if variant.dtype != dtype] or variants


WEEK = 7


def of_the_day(cases: Sequence[T], share: int, day: datetime.date, test: str) -> list[T]:
    """Return one case in `share`, and at least one: others each day, and all of them within `share` days.

    Neighbors are alike, so the order is shuffled, by the name of the test and not by the day: a case that is
    skipped on all days of one cycle would never run.
    """
    if not 1 <= share <= WEEK:
        raise ValueError(
            f"{test}: share({share}) would leave cases out for longer than a week; at most {WEEK}"
        )
    shuffled = random.Random(test).sample(cases, len(cases))
    share = min(share, len(shuffled))
    return shuffled[day.toordinal() % share :: share] if shuffled else []


@dataclass(frozen=True)
class Sample:
    """Chooses from cases that take too long to run in full: others every day; all with `--thorough`."""

    turn: int
    everything: bool

    def __call__(self, things: Iterable[T], most: int) -> Sequence[T]:
        """Return at most this many of them, far apart."""
        offered = list(things)
        if self.everything or len(offered) <= most:
            return offered
        step = len(offered) // most
        return [offered[(self.turn + number * step) % len(offered)] for number in range(most)]


def check(
    operation: Operation[Any],
    rung: Rung[Any],
    problem: Any,
    config: Config,
    device: torch.device,
    seed: int,
    options: TwinOptions = TwinOptions(),
) -> None:
    """One run against the reference: outputs and workspaces poisoned, inputs compared afterwards."""
    outcome = VerificationCase(operation, problem, device, seed).check(rung, problem.layout, config, options)
    assert outcome.passed, f"{outcome.label} with {config}: {outcome.failure}"


def label(value: object) -> str | None:
    """Names in test ids: operations and rungs, and problems with dtype and layout."""
    if isinstance(value, Operation | Rung):
        return value.name
    if hasattr(value, "dtype") and hasattr(value, "layout"):
        return f"{value.name}-{value.dtype}-{value.layout}"  # type: ignore[attr-defined]
    return None


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run `work` in several threads at once, each with its number; raise the first failure here."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
