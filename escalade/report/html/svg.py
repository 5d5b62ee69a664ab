"""Pictures inside a page: SVG whose text, axes and colours are the page's own, in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

_INK = "#010203"
"""Stands for the colour of the page's text until the picture is on the page."""
BLUE, GOLD, RED, PURPLE, GREEN, GREY = "#2f6db5", "#b58a1b", "#c2542d", "#7a52a8", "#3f8f5f", "#8a8f98"
_ON_PAGE = {
    _INK: "currentColor",
    BLUE: "var(--blue)",
    GOLD: "var(--gold)",
    RED: "var(--red)",
    PURPLE: "var(--purple)",
    GREEN: "var(--green)",
    GREY: "var(--grey)",
}
"""What the page has in place of a colour."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.hashsalt": "escalade",  # the same records give the same file
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 9,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACE = re.compile(r'\s+xmlns(:\w+)?="[^"]*"')
_NAMED = re.compile(r'(\bid="|href="#|url\(#)')
_COLOUR = re.compile("|".join(_ON_PAGE))
_WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)pt"')
_GROUP = re.compile(r'<g id="([^"]*)">')
_NOTHING: Mapping[str, str] = MappingProxyType({})


def inline(draw: Callable[[], Figure], name: str, title: str, words: Mapping[str, str] = _NOTHING) -> Markup:
    """What `draw` makes, as an element of a page on which no other has the name. `words` are shown where the parts that
    have these names (matplotlib's `gid`) are pointed at."""
    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        draw().savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = _NAMESPACE.sub("", _METADATA.sub("", text[text.index("<svg") :])).replace("xlink:href", "href")
    if words:
        text = _GROUP.sub(lambda group: _with_words(group, words), text)
    text = _NAMED.sub(rf"\g<1>{name}-", text)
    text = _COLOUR.sub(lambda colour: _ON_PAGE[colour[0]], text)
    inches = float(_WIDTH.search(text)[1]) / 72  # type: ignore[index]
    opened = f'<svg role="img" aria-label="{escape(title)}" style="--inches: {inches:g}"'
    return Markup(text.replace("<svg", opened, 1))


def _with_words(group: re.Match[str], words: Mapping[str, str]) -> str:
    said = words.get(group[1])
    return f"{group[0]}<title>{escape(said)}</title>" if said else group[0]
