"""A section of the page: a plan, the command that measures it, and its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escalade.measure.records import Record


@dataclass(frozen=True)
class Section:
    """A table of the page, with what is to be said in front of it."""

    title: str
    about: str
    command: str
    """What measures it, on a machine with a GPU."""
    block: Callable[[Sequence[Record]], str]
    """The table of the records; nothing where there are none."""
    level: int = 2

    def text(self, records: Sequence[Record]) -> str:
        found = self.block(records) or "It has not been measured yet.\n"
        return (
            f"\n{'#' * self.level} {self.title}\n\n{self.about}\n\nMeasured by `{self.command}`, then `escalade "
            f"tables`.\n\n{found}"
        )
