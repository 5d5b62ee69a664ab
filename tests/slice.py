"""`make test-slice`: rungs, configs and variants that `make test` does not run, on the twin, chosen by the date.

`make test` always runs the same twentieth of all cases. This draws from the rest until its
time is up. Failures are printed with the command that repeats them.

`--plans 'torchvision/*'` draws from the launches of networks' plans for an H200 instead of from small problems: the
same rungs and, where a smaller image permits it, the same configs, with the networks' own channels, filters and
epilogues.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Config, Operation, Rung
from escalade.tune.verification import VerificationCase
from tests.golden import plans
from tests.support import all_rungs, supported

CPU = torch.device("cpu")
_CHECKED = 4
"""One in this many cases has its accesses checked, which takes long; threads are shuffled in all."""
_MOST_FLOPS = 2**23
"""Time limit of a case with checks."""
_MOST_PLANNED_FLOPS = 2**27
_SIZES = ((1, 10), (2, 12), (1, 16), (2, 20), (3, 24), (1, 32), (1, 57), (1, 80))
"""Batch sizes and sides of images that replace those of planned problems, smallest first."""


@dataclass(frozen=True)
class Piece:
    """One run: the words of `--repeat`."""

    operation: str
    rung: str
    problem: str
    dtype: str
    layout: str
    config: int
    """Index among the configs that the rung offers."""
    seed: int
    """Seed of the inputs and of the order of threads."""
    checks: bool

    def __str__(self) -> str:
        return (
            f"{self.operation} {self.rung} {self.problem} {self.dtype} {self.layout} {self.config} {self.seed} "
            f"{'checks' if self.checks else 'plain'}"
        )

    @staticmethod
    def parse(text: str) -> Piece:
        operation, rung, problem, dtype, layout, config, seed, checks = text.split()
        return Piece(operation, rung, problem, dtype, layout, int(config), int(seed), checks == "checks")

    @property
    def command(self) -> str:
        return f"python -m tests.slice --repeat {shlex.quote(str(self))}"

    def failure(self) -> str:
        """Return the error; empty if there is none."""
        operation = OPERATIONS[self.operation]
        rung = operation.ladder.rung(self.rung)
        problem = replace(operation.parse(self.problem), dtype=self.dtype, layout=self.layout)
        config = rung.configs(problem)[self.config]
        options = TwinOptions(order=Order(seed=self.seed, late=self.checks), checks=self.checks)
        case = VerificationCase(operation, problem, CPU, self.seed)
        if operation.peer(case.problem, case.inputs).double().isinf().any():
            return ""  # random inputs overflow the dtype: sums of many, or quotients
        outcome = case.check(rung, self.layout, config, options)
        return "" if outcome.passed else f"{outcome.label} with {config}: {outcome.failure}"


def pieces(seed: str) -> Iterator[Piece]:
    """Yield cases without end, the same for the same seed: each rung equally often, then any variant and config."""
    chance = random.Random(seed)
    while True:
        operation, rung = chance.choice(all_rungs())
        problem = chance.choice(chance.choice(supported(operation, rung, operation.small_problems)))
        checks = chance.randrange(_CHECKED) == 0 and problem.flops <= _MOST_FLOPS
        yield Piece(
            operation.name, rung.name, problem.name, problem.dtype, problem.layout,
            chance.randrange(len(rung.configs(problem))), chance.randrange(1, 2**31), checks,
        )  # fmt: skip


def planned_pieces(seed: str, pattern: str) -> Iterator[Piece]:
    """Yield launches of the networks' plans, one plan after another: a few choices of each rung in each.

    `pattern` selects among the names of `tests.golden.plans.tasks`.
    """
    chance = random.Random(seed)
    tasks = fnmatch.filter(plans.own_tasks(), pattern) or fnmatch.filter(plans.tasks(), pattern)
    if not tasks:
        raise SystemExit(
            f"no network matches {pattern}; there are models, varied, layers, torchvision, training"
        )
    done: set[Any] = set()
    for task in chance.sample(tasks, len(tasks)):
        for operation, rung, problem, config in chance.sample(found := plans.choices(task), len(found)):
            smaller = _smaller(operation, rung, problem, config)
            kind = (operation.name, rung.name, config, problem.dtype, problem.layout)
            if smaller is None or kind in done:
                continue
            done.add(kind)
            problem, number = smaller
            yield Piece(
                operation.name, rung.name, problem.name, problem.dtype, problem.layout, number,
                chance.randrange(1, 2**31), problem.flops <= _MOST_FLOPS,
            )  # fmt: skip


def _smaller(
    operation: Operation[Any], rung: Rung[Any], problem: Any, config: Config
) -> tuple[Any, int] | None:
    """Return a problem with a small batch and image, and the number of a config: the planned one if it is offered."""
    other = None
    rung = operation.ladder.rung(rung.name)
    for batch, side in _SIZES:
        try:
            smaller = _sized(problem, batch, side)
        except UnsupportedError:
            continue
        if smaller.flops > _MOST_PLANNED_FLOPS:
            break
        offered = [one.as_dict() for one in rung.configs(smaller)] if not rung.supports(smaller) else []
        if config.as_dict() in offered:
            return smaller, offered.index(config.as_dict())
        if offered and other is None:
            other = smaller, 0
    return other


def _sized(problem: Any, batch: int, side: int) -> Any:
    """Return the problem, or the one whose gradient it is, with other sizes; images keep their size modulo 4."""
    changed = {}
    for field in fields(problem):
        value = getattr(problem, field.name)
        if is_dataclass(value) and hasattr(value, "batch"):
            changed[field.name] = _sized(value, batch, side)
        elif field.name == "batch":
            changed["batch"] = min(value, batch)
        elif field.name in ("height", "width") and value > side:
            changed[field.name] = side - (side - value) % 4
        elif field.name in ("rows", "elements") and value > 16 * side**2:
            changed[field.name] = 16 * side**2 + value % 16
    return replace(problem, **changed)


def run(seed: str, seconds: float, pattern: str = "") -> tuple[int, list[str]]:
    """Run cases until the time is up; return their number, and the failures with the commands that repeat them."""
    torch.set_num_threads(1)
    began, count, failures = time.monotonic(), 0, []
    for piece in planned_pieces(seed, pattern) if pattern else pieces(seed):
        if count and time.monotonic() - began > seconds:
            break
        count += 1
        failure = piece.failure()
        if failure:
            failures.append(f"{failure}\n  repeat with: {piece.command}")
            print(failures[-1], flush=True)
    return count, failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plans", metavar="GLOB", default="", help="draw from plans of these networks")
    parser.add_argument("--repeat", metavar="PIECE", help="one run, in the words of a failure")
    options = parser.parse_args(arguments)
    if options.repeat:
        failure = Piece.parse(options.repeat).failure()
        print(failure or "right")
        return 1 if failure else 0
    print(f"the slice of {options.date} (another: make test-slice DATE=...)", flush=True)
    seeds = [f"{options.date} {number}" for number in range(options.processes)]
    with ProcessPoolExecutor(options.processes) as pool:
        one = partial(run, seconds=options.seconds, pattern=options.plans)
        results = list(pool.map(one, seeds))
    failures = [failure for _, failed in results for failure in failed]
    print(f"{sum(count for count, _ in results)} runs, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("ESCALADE_CACHE_DIR", os.path.join(os.getcwd(), ".cache", "escalade"))
    sys.exit(main())
