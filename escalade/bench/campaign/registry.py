"""All units of work by name: what README and docs show, and nothing else."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence

from escalade.bench.campaign import coverage, ladders, layers, networks, steps
from escalade.bench.campaign.units import Unit
from escalade.errors import UnsupportedError

KINDS: tuple[Callable[[], Iterator[Unit]], ...] = (
    ladders.units,
    networks.units,
    steps.units,
    layers.units,
    coverage.units,
)
"""The makers of units, one for each kind of table."""


def units() -> dict[str, Unit]:
    """Every unit there is, by its name."""
    return {unit.name: unit for kind in KINDS for unit in kind()}


def named(patterns: Sequence[str]) -> list[Unit]:
    """The units that the patterns find, all without any: a name, how it begins, or a pattern with `*`."""
    every = units()
    if not patterns:
        return list(every.values())
    found: dict[str, Unit] = {}
    for pattern in patterns:
        own = {name: unit for name, unit in every.items() if _fits(name, pattern.rstrip("/"))}
        if not own:
            kinds = ", ".join(dict.fromkeys(name.partition("/")[0] for name in every))
            raise UnsupportedError(
                f"there is no unit {pattern!r}; names begin with {kinds}: escalade measure --list"
            )
        found |= own
    return list(found.values())


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}/") or fnmatch.fnmatchcase(name, pattern)
