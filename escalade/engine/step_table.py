"""Tables as HTML for notebooks, with a bar in every row."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_CELL = "padding:2px 8px;text-align:{align};white-space:nowrap"
_BAR = "display:inline-block;height:0.7em;background:#2f6db5;width:{width:.1f}px"
_BAR_PIXELS = 160.0
"""Width of the longest bar."""


def table_html(
    title: str,
    texts: Sequence[str],
    figures: Sequence[str],
    rows: Sequence[Sequence[str]],
    measure: str,
    values: Sequence[float],
    sentences: Sequence[str],
) -> str:
    """Return a table with a bar per row for its value in `values`, which are of `measure`, and sentences below it.

    `texts` and `figures` are the heads of left-aligned and right-aligned columns.
    """
    largest = max(values, default=0.0) or 1.0
    aligns = [*["left"] * len(texts), *["right"] * len(figures)]
    heads = [
        _cell("th", head, align)
        for head, align in zip((*texts, *figures, measure), (*aligns, "left"), strict=True)
    ]
    lines = []
    for row, value in zip(rows, values, strict=True):
        cells = [_cell("td", text, align) for text, align in zip(row, aligns, strict=True)]
        bar = f'<span style="{_BAR.format(width=_BAR_PIXELS * value / largest)}" title="{value:g} {escape(measure)}">'
        lines.append(f"<tr>{''.join(cells)}<td>{bar}</span></td></tr>")
    below = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<div style="overflow-x:auto"><table><caption style="text-align:left">{escape(title)}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>{below}</div>"
    )


def _cell(tag: str, text: str, align: str) -> str:
    return f'<{tag} style="{_CELL.format(align=align)}">{escape(text)}</{tag}>'
