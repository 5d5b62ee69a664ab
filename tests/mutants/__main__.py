"""`python -m tests.mutants`: plant bugs one at a time and check that the tests notice."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

from tests.mutants import apps, files, kernels, nodes, passes, planner, trainer, training
from tests.mutants.mutant import Mutant
from tests.mutants.runner import IMPORTED, Outcome, scratch

ROOT = pathlib.Path(__file__).parent.parent.parent
ALL: tuple[Mutant, ...] = tuple(
    mutant
    for area in (planner, passes, nodes, files, kernels, training, trainer, apps)
    for mutant in area.MUTANTS
)
MOST_SURVIVORS = 1 / 20
"""Share of mutants that may survive."""


def selected(patterns: Sequence[str], part: str) -> list[Mutant]:
    """Return the mutants whose name or area matches any of the patterns; of those, part k of n."""
    chosen = [
        mutant
        for mutant in ALL
        if not patterns
        or any(fnmatch(mutant.name, word) or mutant.name.startswith(word + "/") for word in patterns)
    ]
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"--part {part}: expected K/N with 1 <= K <= N, for instance 3/7")
    return chosen[int(number) - 1 :: int(count)]


def run(
    mutants: Sequence[Mutant],
    root: pathlib.Path,
    cache: pathlib.Path,
    baseline: bool = True,
    imported: Sequence[str] = IMPORTED,
) -> int:
    """Plant every mutant, print its outcome, and return the exit status."""
    counts = dict.fromkeys(Outcome, 0)
    with scratch(root, cache, imported) as copy:
        if baseline and not copy.passes_unchanged(mutants):
            print("the tests fail without any mutant: repair them first")
            return 1
        for mutant in mutants:
            began = time.monotonic()
            outcome = copy.outcome(mutant)
            counts[outcome] += 1
            print(f"{outcome.value:<9}{mutant.name} ({time.monotonic() - began:.0f} s)", flush=True)
    print(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count))
    return exit_status(counts)


def exit_status(counts: Mapping[Outcome, int]) -> int:
    too_many = counts[Outcome.SURVIVED] > MOST_SURVIVORS * sum(counts.values())
    return 1 if too_many or counts[Outcome.STALE] or counts[Outcome.BROKEN] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="names, areas or patterns such as 'planner/*'; all by default"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth mutant from the Kth on")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not first run the tests without a mutant"
    )
    options = parser.parse_args(arguments)
    mutants = selected(options.names, options.part)
    if options.list:
        print(*(f"{mutant.name}  {mutant.file}" for mutant in mutants), sep="\n")
        return 0
    if not mutants:
        raise SystemExit("no mutant has such a name; see --list")
    cache = pathlib.Path(os.environ.get("ESCALADE_CACHE_DIR", ROOT / ".cache" / "escalade"))
    return run(mutants, ROOT, cache, baseline=not options.no_baseline)


if __name__ == "__main__":
    sys.exit(main())
