"""`make test-slice`: other rungs, configs and variants than `make test` runs, on the twin, as the date chooses them.

`make test` says the same every time; of all that could be run it runs a twentieth. This draws from the rest until its
time is up. What fails is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops import OPERATIONS
from escalade.tune.verification import VerificationCase
from tests.support import all_rungs, supported

CPU = torch.device("cpu")
_CHECKED = 4
"""One piece in so many has its accesses checked, which takes long; threads are shuffled in all."""
_MOST_FLOPS = 2**23
"""Of a piece with checks."""


@dataclass(frozen=True)
class Piece:
    """One run: the words of `--repeat`."""

    operation: str
    rung: str
    problem: str
    dtype: str
    layout: str
    config: int
    """Which of those that the rung offers."""
    seed: int
    """Of the inputs and of the order of threads."""
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
        """What is wrong; empty if nothing is."""
        operation = OPERATIONS[self.operation]
        rung = operation.ladder.rung(self.rung)
        problem = replace(operation.parse(self.problem), dtype=self.dtype, layout=self.layout)
        config = rung.configs(problem)[self.config]
        options = TwinOptions(order=Order(seed=self.seed, late=self.checks), checks=self.checks)
        outcome = VerificationCase(operation, problem, CPU, self.seed).check(
            rung, self.layout, config, options
        )
        return "" if outcome.passed else f"{outcome.label} with {config}: {outcome.failure}"


def pieces(seed: str) -> Iterator[Piece]:
    """Without end, the same for the same seed: every rung as often as any other, then any variant and config."""
    chance = random.Random(seed)
    while True:
        operation, rung = chance.choice(all_rungs())
        problem = chance.choice(chance.choice(supported(operation, rung, operation.small_problems)))
        checks = chance.randrange(_CHECKED) == 0 and problem.flops <= _MOST_FLOPS
        yield Piece(
            operation.name, rung.name, problem.name, problem.dtype, problem.layout,
            chance.randrange(len(rung.configs(problem))), chance.randrange(1, 2**31), checks,
        )  # fmt: skip


def run(seed: str, seconds: float) -> tuple[int, list[str]]:
    """Pieces until the time is up; how many, and what failed with how to repeat it."""
    torch.set_num_threads(1)
    began, count, failures = time.monotonic(), 0, []
    for piece in pieces(seed):
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
    parser.add_argument("--repeat", metavar="PIECE", help="one run, in the words of a failure")
    options = parser.parse_args(arguments)
    if options.repeat:
        failure = Piece.parse(options.repeat).failure()
        print(failure or "right")
        return 1 if failure else 0
    print(f"the slice of {options.date} (another: make test-slice DATE=...)", flush=True)
    seeds = [f"{options.date} {number}" for number in range(options.processes)]
    with ProcessPoolExecutor(options.processes) as pool:
        results = list(pool.map(run, seeds, [options.seconds] * len(seeds)))
    failures = [failure for _, failed in results for failure in failed]
    print(f"{sum(count for count, _ in results)} runs, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("ESCALADE_CACHE_DIR", os.path.join(os.getcwd(), ".cache", "escalade"))
    sys.exit(main())
