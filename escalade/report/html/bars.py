"""Rows of bars, each with its name; and such of ratios, from 1× on: to the right is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from escalade.report import cells

_WIDTH = 8.0
_LETTER = 0.067
"""Inches of a letter of a name."""


def named_rows(names: Sequence[str], inches: float, axis: str, title: str) -> tuple[Figure, Any]:
    """A figure with room for a row a name, each so many inches high, and its axes."""
    rows = inches * len(names)
    height, left = rows + 0.9, 0.2 + _LETTER * max(map(len, names))
    # Margins by hand: to find them by drawing takes three times as long as the drawing.
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((left / _WIDTH, 0.5 / height, 1 - (left + 0.5) / _WIDTH, rows / height))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(axis, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


@dataclass(frozen=True)
class Series:
    """A bar for each name; None where there is no ratio."""

    label: str
    ratios: Sequence[float | None]
    colour: str
    below: str = ""
    """The colour of what is below 1×, if it has its own."""


def ratio_figure(names: Sequence[str], series: Sequence[Series], axis: str, title: str) -> Figure:
    """The bars of one name lie under each other, and each is marked by its label and its name."""
    figure, axes = named_rows(names, 0.06 + 0.16 * len(series), axis, title)
    part = 0.84 / len(series)
    for number, one in enumerate(series):
        shown = [(place, ratio) for place, ratio in enumerate(one.ratios) if ratio]
        if not shown:
            continue
        bars = axes.barh(
            [place + (number - (len(series) - 1) / 2) * part for place, _ in shown],
            [ratio - 1 for _, ratio in shown],
            height=part,
            left=1,
            color=[one.below if one.below and ratio < 1 else one.colour for _, ratio in shown],
            label=one.label,
        )
        for (place, _), bar in zip(shown, bars, strict=True):
            bar.set_gid(f"{one.label}-{place}")
        axes.bar_label(bars, [cells.times(ratio) for _, ratio in shown], fontsize=7, padding=2)
    axes.axvline(1, color="#8a8f98", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)
    return figure
