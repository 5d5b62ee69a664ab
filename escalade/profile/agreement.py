"""The twin's counts beside a card's: the same names for the same launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from escalade.fitted import Table
from escalade.profile.counters import COUNTS, Counters

CLOSE = 0.05
"""The part of a count that the two may differ by and still agree."""


@dataclass(frozen=True)
class Pair:
    """One count by both."""

    name: str
    card: int
    twin: int

    @property
    def off(self) -> float:
        """The part of the larger one by which they differ."""
        return abs(self.card - self.twin) / max(self.card, self.twin, 1)


def summed(kernels: Sequence[Counters]) -> dict[str, int]:
    """The counts of several launches together, those that every launch has."""
    known = (name for name in COUNTS if kernels and all(name in one.counts for one in kernels))
    return {name: sum(one.counts[name] for one in kernels) for name in known}


def pairs(card: Mapping[str, int], twin: Mapping[str, int]) -> list[Pair]:
    """What the card counted beside the twin, which leaves out what never happened; nothing on both sides is no pair."""
    found = (Pair(name, count, twin.get(name, 0)) for name, count in card.items())
    return [pair for pair in found if pair.card or pair.twin]


def table(found: Sequence[Pair]) -> Table:
    shown = Table(title="Counted by ncu and on the twin", title_justify="left")
    shown.add_column("count")
    for heading in ("ncu", "twin", "off by"):
        shown.add_column(heading, justify="right")
    for pair in found:
        off = f"{100 * pair.off:.1f}%"
        shown.add_row(
            pair.name, f"{pair.card:,}", f"{pair.twin:,}", off if pair.off <= CLOSE else f"[yellow]{off}[/]"
        )
    return shown


def said(found: Sequence[Pair]) -> str:
    close = sum(pair.off <= CLOSE for pair in found)
    return f"{close} of {len(found)} counts agree within {100 * CLOSE:.0f}%."
