"""What the report is made of: sections, each with its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from escalade.measure.records import Record

CardRecords = dict[str, list[Record]]
"""What was measured on cards, by GPU folder, the preferred one first."""


@dataclass(frozen=True)
class Picture:
    """A plot, or a sheet of images, with its title and what else is to be said of it."""

    title: str
    drawn: Markup
    caption: str = ""
    is_plan: bool = False
    """Whether its blocks say more when they are pointed at."""


@dataclass(frozen=True)
class Section:
    """A part of the report, with a name that links lead to."""

    key: str
    title: str
    body: Markup
    pictures: Sequence[Picture] = ()
    inner: bool = False
    """Whether it belongs to the section before it."""
