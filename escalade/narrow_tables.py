"""Rich tables that stay readable on narrow terminals: columns that do not fit move to further tables below."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_UNLIMITED_WIDTH = 10_000  # characters; wider than any table, to measure columns without wrapping


class Table(table.Table):
    """Rich table that splits into several tables, one below the other, if it is wider than the terminal.

    Each repeats the name columns: those before the first right-aligned one. If even that does not fit, every row is
    printed as a line of text.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            if not column.no_wrap:
                column.overflow = "fold"
        groups = self._column_groups(console, options)
        if not groups:
            yield from self._lines(console)
            return
        for number, columns in enumerate(groups):
            piece = copy.copy(self)
            piece.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
            piece.title = self.title if number == 0 else None
            yield from table.Table.__rich_console__(piece, console, options)

    def _column_groups(self, console: Console, options: ConsoleOptions) -> list[list[table.Column]]:
        """Return the columns of each table; empty if a column does not fit next to the name columns."""
        unlimited, width = options.update(width=_UNLIMITED_WIDTH), options.max_width
        needed = {}
        for column in self.columns:
            found = self._measure_column(console, unlimited, column)
            needed[column._index] = found.maximum if column.no_wrap else found.minimum

        def fits(columns: Sequence[table.Column]) -> bool:
            borders = len(columns) + 1 if self.box else 0
            return sum(needed[column._index] for column in columns) + borders <= width

        if fits(self.columns):
            return [self.columns]
        names = self._name_columns()
        groups = [list(names)]
        for column in self.columns[len(names) :]:
            if not fits([*names, column]):
                return []
            if fits([*groups[-1], column]):
                groups[-1].append(column)
            else:
                groups.append([*names, column])
        return groups

    def _name_columns(self) -> list[table.Column]:
        first = next((index for index, column in enumerate(self.columns) if column.justify == "right"), 1)
        return self.columns[: max(first, 1)]

    def _lines(self, console: Console) -> Iterable[Text]:
        if self.title:
            yield _text(self.title, console)
        names = len(self._name_columns())
        for row in zip(*(column.cells for column in self.columns), strict=True):
            cells = [_text(cell, console) for cell in row]
            figures = [
                Text(" ").join(part for part in (_text(column.header, console), cell) if part.plain)
                for column, cell in zip(self.columns[names:], cells[names:], strict=True)
                if cell.plain
            ]
            line = Text(" ").join(cell for cell in cells[:names] if cell.plain)
            yield Text(": ").join(part for part in (line, Text(", ").join(figures)) if part.plain)


def _text(cell: object, console: Console) -> Text:
    return cell.copy() if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)
