"""Ladder: the rungs of one operation, each adding one idea to an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import P
from escalade.ops.base.rung import Rung


@dataclass(frozen=True)
class Ladder(Generic[P]):
    """The rungs of one operation, from naive to fastest."""

    operation: str
    rungs: tuple[Rung[P], ...]

    def __post_init__(self) -> None:
        names = [rung.name for rung in self.rungs]
        if len(set(names)) != len(names):
            raise ValueError(f"the ladder of {self.operation} has two rungs of one name: {names}")
        for position, rung in enumerate(self.rungs):
            for below in rung.rungs_below:
                if below not in names[:position]:
                    raise ValueError(f"rung {rung.name} builds on {below}, which does not precede it")

    def on(self, card: Card) -> Ladder[P]:
        """Return these rungs for a card."""
        return Ladder(self.operation, tuple(rung.on(card) for rung in self.rungs))

    def __iter__(self) -> Iterator[Rung[P]]:
        return iter(self.rungs)

    def rung(self, name: str) -> Rung[P]:
        for rung in self.rungs:
            if rung.name == name:
                return rung
        known = ", ".join(rung.name for rung in self.rungs)
        raise UnsupportedError(f"{self.operation} has no rung {name!r}; it has {known}")

    def supporting(self, problem: P) -> tuple[Rung[P], ...]:
        return tuple(rung for rung in self.rungs if rung.supports(problem) is None)
