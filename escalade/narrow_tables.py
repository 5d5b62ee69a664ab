"""Tables that lose no figure on a narrow terminal: what does not fit beside the rest follows below it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_ROOM = 10_000
"""Characters that no table needs, to measure its columns by."""


class Table(table.Table):
    """A table of Rich's, whose columns are in several tables below each other where a line has no room for all.

    Each has the columns that name a row: those in front of the first figures. Where not even these fit, every row is a
    line of text.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            if not column.no_wrap:
                column.overflow = "fold"
        parts = self._parts(console, options)
        if not parts:
            yield from self._lines(console)
            return
        for number, columns in enumerate(parts):
            part = copy.copy(self)
            part.columns = [replace(column, _index=place) for place, column in enumerate(columns)]
            part.title = self.title if number == 0 else None
            yield from table.Table.__rich_console__(part, console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[table.Column]]:
        """The columns of each table; none if one of them does not fit beside the names."""
        roomy, width = options.update(width=_ROOM), options.max_width
        needed = {}
        for column in self.columns:
            found = self._measure_column(console, roomy, column)
            needed[column._index] = found.maximum if column.no_wrap else found.minimum

        def fits(columns: Sequence[table.Column]) -> bool:
            borders = len(columns) + 1 if self.box else 0
            return sum(needed[column._index] for column in columns) + borders <= width

        if fits(self.columns):
            return [self.columns]
        names = self._names()
        parts = [list(names)]
        for column in self.columns[len(names) :]:
            if not fits([*names, column]):
                return []
            if fits([*parts[-1], column]):
                parts[-1].append(column)
            else:
                parts.append([*names, column])
        return parts

    def _names(self) -> list[table.Column]:
        first = next((place for place, column in enumerate(self.columns) if column.justify == "right"), 1)
        return self.columns[: max(first, 1)]

    def _lines(self, console: Console) -> Iterable[Text]:
        if self.title:
            yield _text(self.title, console)
        names = len(self._names())
        for row in zip(*(column.cells for column in self.columns), strict=True):
            cells = [_text(cell, console) for cell in row]
            figures = [
                Text.assemble(_text(column.header, console), " ", cell)
                for column, cell in zip(self.columns[names:], cells[names:], strict=True)
                if cell.plain
            ]
            line = Text(" ").join(cells[:names])
            yield Text.assemble(line, ": ", Text(", ").join(figures)) if figures else line


def _text(given: object, console: Console) -> Text:
    return given.copy() if isinstance(given, Text) else console.render_str(str(given), highlight=False)
