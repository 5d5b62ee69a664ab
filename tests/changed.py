"""Rungs that have changed since they last ran on all their small problems.

`make test` runs each rung on some problems, others every day. Changed rungs run at once on all: `tried.json` stores a
digest of launches and sources per rung, and a rung with another digest runs on all its problems and layouts.

`python -m tests.changed` runs those rungs and writes their digests. Without it `make test` runs them again each time,
about `MOST` cases per operation: rungs that change together, with a header that they include, are alike.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.tune.verification import VerificationCase
from tests.golden.sources import digest, source_digest
from tests.support import all_rungs, supported

TRIED = pathlib.Path(__file__).with_name("tried.json")
MOST, LEAST = 20, 4
"""Cases of all changed rungs of an operation together, and the fewest of one rung."""


def key(operation: Operation[Any], rung: Rung[Any]) -> str:
    return f"{operation.name}/{rung.name}"


def problems(operation: Operation[Any], rung: Rung[Any]) -> list[Any]:
    """Return every small problem that the rung supports, in every dtype and layout."""
    return list(chain(*supported(operation, rung, operation.small_problems)))


def digest_of(operation: Operation[Any], rung: Rung[Any]) -> str:
    """Return a digest of the rung's launches for its small problems, ignoring comments in sources."""
    texts = []
    for problem in problems(operation, rung):
        recipe = rung.recipe(problem, rung.configs(problem)[0])
        texts.append(f"{problem.name} {problem.dtype} {problem.layout} {recipe}")
        texts += [source_digest(program.source) for program in recipe.programs]
    return digest("\n".join(texts))


def changed(operation: Operation[Any]) -> Iterator[Rung[Any]]:
    """Yield the rungs of an operation that differ from the recorded ones."""
    tried = json.loads(TRIED.read_text()) if TRIED.exists() else {}
    for rung in operation.ladder:
        if tried.get(key(operation, rung)) != digest_of(operation, rung):
            yield rung


def most(rungs: int) -> int:
    """Return the number of cases to run of each of `rungs` changed rungs of an operation."""
    return max(LEAST, MOST // rungs)


def failure(operation: Operation[Any], rung: Rung[Any], problem: Any, seed: int) -> str:
    """Run a problem with checks, shuffled threads and late copies; return the errors."""
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    case = VerificationCase(operation, problem, torch.device("cpu"), seed)
    outcome = case.check(rung, problem.layout, rung.configs(problem)[0], options)
    return "" if outcome.passed else f"{outcome.label}: {outcome.failure}"


def main() -> int:
    wrong = 0
    for operation in OPERATIONS.values():
        for rung in changed(operation):
            each = problems(operation, rung)
            print(f"{key(operation, rung)}: {len(each)} problems", flush=True)
            failures = list(filter(None, (failure(operation, rung, problem, 1) for problem in each)))
            print(*failures, sep="\n", end="\n" if failures else "", flush=True)
            wrong += len(failures)
            if not failures:
                write({key(operation, rung): digest_of(operation, rung)})
    return 1 if wrong else 0


def write(digests: dict[str, str]) -> None:
    """Add digests to the file; drop those of rungs that no longer exist."""
    known = {key(operation, rung) for operation, rung in all_rungs()}
    tried = (json.loads(TRIED.read_text()) if TRIED.exists() else {}) | digests
    TRIED.write_text(
        json.dumps({name: tried[name] for name in sorted(tried) if name in known}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
