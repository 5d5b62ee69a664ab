"""All units of work by name: what README and docs show, and nothing else."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Sequence

from escalade.bench.campaign import (
    calls,
    coverage,
    evaluation,
    ladders,
    layers,
    networks,
    steps,
    traffic,
)
from escalade.bench.campaign.units import Unit
from escalade.errors import UnsupportedError

KINDS: dict[str, Callable[[], Iterator[Unit]]] = {
    "ladder": ladders.units,
    "ablation": ladders.units,
    "crossover": ladders.units,
    "network": networks.units,
    "steps": steps.units,
    "layers": layers.units,
    "coverage": coverage.units,
    "evaluation": evaluation.units,
    "calls": calls.units,
    "traffic": traffic.units,
}
"""The makers of units, by what their names begin with."""


def units(kinds: Collection[str] = KINDS) -> dict[str, Unit]:
    """Every unit there is of these kinds, by its name."""
    makers = dict.fromkeys(make for kind, make in KINDS.items() if kind in kinds)
    return {unit.name: unit for make in makers for unit in make() if unit.kind in kinds}


def named(patterns: Sequence[str]) -> list[Unit]:
    """The units that the patterns find, all without any: a name, how it begins, or a pattern with `*`."""
    asked = {pattern.partition("/")[0] for pattern in patterns}
    every = units(asked if asked and asked <= set(KINDS) else KINDS)  # some take a while to list
    if not patterns:
        return list(every.values())
    found: dict[str, Unit] = {}
    for pattern in patterns:
        own = {name: unit for name, unit in every.items() if _fits(name, pattern.rstrip("/"))}
        if not own:
            raise UnsupportedError(
                f"there is no unit {pattern!r}; names begin with {', '.join(KINDS)}: escalade measure --list"
            )
        found |= own
    return list(found.values())


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}/") or fnmatch.fnmatchcase(name, pattern)
