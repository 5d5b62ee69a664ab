"""Pictures inside a page: SVG whose text and axes have the colour of the page's text, in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

_INK = "#010203"
"""Stands for the colour of the page's text until the picture is on the page."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.hashsalt": "escalade",  # the same records give the same file
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACE = re.compile(r'\s+xmlns(:\w+)?="[^"]*"')
_NAMED = re.compile(r'(\bid="|href="#|url\(#)')


def inline(draw: Callable[[], Figure], name: str, title: str) -> Markup:
    """What `draw` makes, as an element of a page on which no other has the name."""
    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        draw().savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = _NAMESPACE.sub("", _METADATA.sub("", text[text.index("<svg") :])).replace("xlink:href", "href")
    text = _NAMED.sub(rf"\g<1>{name}-", text).replace(_INK, "currentColor")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))
