"""A table: columns, rows and a legend, rendered for a terminal, as Markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape as plain

from escalade.narrow_tables import Table as Fitted
from escalade_bench.measure.records import Record
from escalade_bench.report import cells

Cell = Callable[[Any], str]
_STYLES = {"": ("{}", "{}"), "code": ("`{}`", "<code>{}</code>"), "bold": ("**{}**", "<strong>{}</strong>")}
"""Styles of a column's cells, in Markdown and in HTML."""
_RATIOS = (
    "vs ",
    "gain",
    "ratio",
    "faster ",
    "speedup",
    "times as fast",
    "worst",
    "over the first",
    "fusion alone",
)
"""Prefixes of headings of ratios: above 1× is good, below is bad; HTML colors them."""
_OURS = "Escalade"
"""Prefix of headings of our times: text in such a column says why a time is missing."""
_LOSSES = ("slower", "not right")
"""Prefixes of headings of counts that should be zero."""
_DENSE, _UPRIGHT = 11, 20
"""From this many columns on, HTML uses a smaller font, so that the table fits next to the navigation."""
_LONGEST_FIGURE = 20
"""A longer cell of a column of figures is the reason why there is none, and may break anywhere."""
_MEASURED = "measured"
_STAMP = re.compile(r"\w+ \d\d-\d\d")
_FIGURE = re.compile(r"[\d,]*\.?\d+")
_WIDE = ("p20–p80", "GB/s", "registers", "occupancy", "config", "note")
"""Headings of columns that are left out on narrow terminals."""
WIDE = 180
"""Width in characters from which a terminal is not narrow."""


@dataclass(frozen=True)
class Column:
    """A column. Numbers are right-aligned, and an empty column is left out."""

    heading: str
    cell: Cell
    left: bool = False
    style: str = ""


def text(heading: str, cell: Cell, style: str = "") -> Column:
    return Column(heading, cell, left=True, style=style)


def columns(headings: str, get: Callable[[Any], Record] | None = None) -> list[Column]:
    """Columns of the record that `get` finds in a row (or that the row is), by headings like `dtype|phase=rung|µs`."""
    made = []
    for named in headings.split("|"):
        heading, _, key = named.partition("=")
        cell = (cells.TEXTS | cells.FIGURES)[key or heading]
        found = cell if get is None else lambda row, cell=cell: cell(get(row))
        left = (key or heading) in cells.TEXTS
        made.append(Column(heading, found, left, "code" if heading == "problem" else ""))
    return made


def items(*headings: str) -> list[Column]:
    """Columns for rows that begin with the text of their cells. The headings of figures begin with `>`, of code with
    a backtick."""

    def cell(number: int) -> Cell:
        return lambda row: str(row[number])

    return [
        Column(heading.lstrip(">`"), cell(n), heading[0] != ">", "code" if heading[0] == "`" else "")
        for n, heading in enumerate(headings)
    ]


@dataclass(frozen=True)
class Table:
    """Rows of any type; `records` returns a row's records, whose commit and day the last column shows."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    records: Callable[[Any], Iterable[Record]] | None = lambda row: (row,)
    """None only for tables without measured figures; by default rows are records."""
    title: str = ""
    legend: str = ""
    level: int = 4
    """Level of the title as a heading; 0 makes it bold text."""

    @property
    def grid(self) -> tuple[list[Column], list[list[str]]]:
        """Return the shown columns, and the text of every cell."""
        every = list(self.columns)
        if self.records is not None:
            sources = self.records
            every.append(text(_MEASURED, lambda row: cells.stamp(sources(row))))
        rows = [[column.cell(row) for column in every] for row in self.rows]
        kept = [n for n in range(len(every)) if any(row[n] for row in rows)] if rows else range(len(every))
        return [every[n] for n in kept], [[row[n] for n in kept] for row in rows]

    @property
    def has_older(self) -> bool:
        return self.records is not None and any(r.older for row in self.rows for r in self.records(row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.rich(options.max_width)

    def rich(self, width: int = WIDE) -> Fitted:
        """Render for a terminal, without commits and days, since the figures have just been measured."""
        made = Fitted(title=plain(self.title), title_justify="left")
        shown, rows = replace(self, records=None).grid
        kept = [n for n, column in enumerate(shown) if width >= WIDE or column.heading not in _WIDE]
        for n in kept:
            short = all(len(row[n]) <= 40 for row in rows)
            made.add_column(shown[n].heading, justify="left" if shown[n].left else "right", no_wrap=short)
        for row in rows:
            made.add_row(*(plain(row[n]) for n in kept))
        return made

    def markdown(self) -> str:
        shown, rows = self.grid
        lines = [[column.heading for column in shown], ["---" if c.left else "---:" for c in shown]]
        for row in rows:
            safe = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
            lines.append(
                [
                    _STYLES[c.style][0].format(cell) if cell else ""
                    for c, cell in zip(shown, safe, strict=True)
                ]
            )
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)

    def html(self) -> Markup:
        shown, rows = self.grid
        head = "".join(f"<th{_kind(c)}>{escape(c.heading)}</th>" for c in shown)
        body = "".join(
            "<tr>" + "".join(_html(c, cell) for c, cell in zip(shown, row, strict=True)) + "</tr>\n"
            for row in rows
        )
        kinds = [name for name, least in (("dense", _DENSE), ("upright", _UPRIGHT)) if len(shown) >= least]
        dense = f' class="{" ".join(kinds)}"' if kinds else ""
        return Markup(
            f'<div class="wide"><table{dense}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'
        )

    @classmethod
    def of(cls, headings: str, rows: Iterable[Sequence[Any]], title: str = "", **others: Any) -> Table:
        """Return a table of rows of text, each with its records behind the cells; headings are those of `items`."""
        return cls(
            items(*headings.split("|")), list(rows), lambda row: filter(None, row[-1]), title, **others
        )

    def titled(self, title: str, level: int | None = None) -> Table:
        return replace(self, title=title, level=self.level if level is None else level)


def _kind(column: Column, cell: str = "") -> str:
    kinds = [] if column.left else ["figure", *(["reason"] if len(cell) > _LONGEST_FIGURE else [])]
    if column.heading.startswith(_RATIOS) and cell.endswith("×"):
        kinds.append("faster" if float(cell[:-1].replace(",", "")) >= 1 else "slower")
    elif column.heading.startswith(_LOSSES) and cell not in ("", "0"):
        kinds.append("slower")
    elif cell.startswith("failed") or (
        column.heading.startswith(_OURS) and cell and not _FIGURE.fullmatch(cell)
    ):
        kinds.append("wrong")
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _html(column: Column, cell: str) -> str:
    shown = _STYLES[column.style][1].format(escape(cell)) if cell else ""
    if column.left:  # names of networks and kernels are long
        shown = shown.replace("_", Markup("_<wbr>"))
    if column.heading == _MEASURED:  # break lines between commits only
        shown = _STAMP.sub(r'<span class="stamp">\g<0></span>', shown)
    return f"<td{_kind(column, cell)}>{shown}</td>"
