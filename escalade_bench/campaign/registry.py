"""All units by name, and named sets of units."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence

from escalade.errors import UnsupportedError
from escalade_bench import calls, evaluation, layers, learning
from escalade_bench.campaign import headline, ladders, networks
from escalade_bench.campaign.units import Unit
from escalade_bench.coverage import run as coverage

STUDIES: tuple[Callable[[], Iterator[Unit]], ...] = (
    ladders.units,
    networks.units,
    layers.units,
    coverage.units,
    evaluation.units,
    learning.units,
    calls.units,
)
HEADLINE, ALL = "headline", "all"
"""The figures of README and the main tables, and the set of all units."""


def units() -> dict[str, Unit]:
    """Return every unit by name."""
    return {unit.name: unit for make in STUDIES for unit in make()}


def named(patterns: Sequence[str]) -> list[Unit]:
    """Return the units that patterns select: a name, its beginning, a pattern with `*`, `headline`, or `all`."""
    every = units()
    found: dict[str, Unit] = {}
    for pattern in patterns or (HEADLINE,):
        wanted = (
            headline.NAMES if pattern == HEADLINE else ("*",) if pattern == ALL else (pattern.rstrip("/"),)
        )
        own = {name: every[name] for one in wanted for name in _selected(every, one)}
        if not own:
            kinds = ", ".join(dict.fromkeys(unit.kind for unit in every.values()))
            raise UnsupportedError(
                f"no unit is named {pattern!r}; names begin with {kinds}: `escalade measure all --list` has them all"
            )
        found |= own
    return list(found.values())


def _selected(every: dict[str, Unit], pattern: str) -> list[str]:
    if pattern in every:
        return [pattern]
    if "*" in pattern or "[" in pattern:
        return fnmatch.filter(every, pattern)
    return [name for name in every if name.startswith(f"{pattern}/")]
