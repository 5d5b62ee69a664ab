"""Tables with a row per step of a plan, for terminals and for notebooks, with sentences below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape as escape_html
from typing import TYPE_CHECKING, Any

from escalade.terminal_text import as_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Columns = Mapping[str, Callable[[Any], str]]
"""The cells of a step by column head."""
_CELL = "padding:2px 8px;text-align:{align};white-space:nowrap"
_BAR = "display:inline-block;height:0.7em;background:#2f6db5;width:{width:.1f}px"
_BAR_PIXELS = 160.0
"""Width of the longest bar."""


class StepTable:
    """A report on the steps of a plan: `str()` returns a table as wide as the terminal. In a notebook it is HTML."""

    steps: Sequence[Any]
    """The rows, each with its `number`."""

    @property
    def _heading(self) -> str:
        raise NotImplementedError

    def _columns(self, width: int | None) -> tuple[Columns, Columns]:
        """Return the columns of texts, left-aligned, and of figures, right-aligned; `width` is None for notebooks."""
        raise NotImplementedError

    def _bars(self) -> tuple[str, list[float]]:
        """Return a measure, and its value for each step, which a notebook shows as the length of a bar."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """Return the totals, one sentence each."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape
        from rich.text import Text

        from escalade.narrow_tables import Table

        texts, figures = self._columns(options.max_width)
        table = Table(title=escape(self._heading), title_justify="left")
        table.add_column("#", justify="right")
        for name in texts:
            table.add_column(name, overflow="fold")
        for name in figures:
            table.add_column(name, justify="right", no_wrap=True)
        for step in self.steps:
            cells = [escape(text(step)) for text in texts.values()]
            table.add_row(str(step.number), *cells, *(figure(step) for figure in figures.values()))
        yield table
        for line in self.summary():
            yield Text(line)

    def _repr_html_(self) -> str:
        texts, figures = self._columns(None)
        measure, values = self._bars()
        largest = max(values, default=0.0) or 1.0
        aligns = [*["left"] * (1 + len(texts)), *["right"] * len(figures)]
        heads = [
            _cell("th", head, align)
            for head, align in zip(("#", *texts, *figures, measure), (*aligns, "left"), strict=True)
        ]
        lines = []
        for step, value in zip(self.steps, values, strict=True):
            row = [str(step.number), *(cell(step) for cell in (*texts.values(), *figures.values()))]
            cells = [_cell("td", text, align) for text, align in zip(row, aligns, strict=True)]
            style = _BAR.format(width=_BAR_PIXELS * value / largest)
            bar = f'<span style="{style}" title="{value:g} {escape_html(measure)}">'
            lines.append(f"<tr>{''.join(cells)}<td>{bar}</span></td></tr>")
        below = "".join(f"<p>{escape_html(sentence)}</p>" for sentence in self.summary())
        return (
            '<div style="overflow-x:auto"><table>'
            f'<caption style="text-align:left">{escape_html(self._heading)}</caption>'
            f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>{below}</div>"
        )


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cell(tag: str, text: str, align: str) -> str:
    return f'<{tag} style="{_CELL.format(align=align)}">{escape_html(text)}</{tag}>'
