"""Rows of bars, each with its name; and such of ratios, from 1× on: to the right is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from escalade.report import cells
from escalade.report.html.svg import GREY

WIDTH = 6.2
"""Inches of a picture."""
_LETTER = 0.067
"""Inches of a letter of a name."""
_BAR, _GAP = 0.16, 0.1
"""Inches of a bar, and between those of two names."""
_NARROW = 5
"""How many times the lowest the highest ratio may be for more lines to stand between them."""


def named_rows(
    names: Sequence[str], heights: Sequence[float], axis: str, legend: bool = False
) -> tuple[Figure, Any, list[float]]:
    """A figure with room for a row a name, each so many inches high, and for a legend above them; its axes, and where
    the rows' middles are."""
    rows = sum(heights)
    height, left = rows + (0.85 if legend else 0.6), 0.2 + _LETTER * max(map(len, names))
    # Margins by hand: to find them by drawing takes three times as long as the drawing.
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left / WIDTH, 0.5 / height, 1 - (left + 0.5) / WIDTH, rows / height))
    middles = [end - own / 2 for end, own in zip(accumulate(heights), heights, strict=True)]
    axes.set_yticks(middles, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(rows, 0)
    axes.margins(x=0.15)
    axes.set_xlabel(axis)
    return figure, axes, middles


@dataclass(frozen=True)
class Series:
    """A bar for each name; None where there is no ratio."""

    label: str
    ratios: Sequence[float | None]
    colour: str
    below: str = ""
    """The colour of what is below 1×, if it has its own."""


def ratio_figure(names: Sequence[str], series: Sequence[Series], axis: str, legend: bool = True) -> Figure:
    """The bars of one name lie under each other, and each is marked by its label and its name."""
    counts = [sum(bool(one.ratios[place]) for one in series) for place in range(len(names))]
    figure, axes, middles = named_rows(names, [_GAP + _BAR * max(count, 1) for count in counts], axis, legend)
    below = [middle - _BAR * (count - 1) / 2 for middle, count in zip(middles, counts, strict=True)]
    for one in series:
        shown = [(place, ratio) for place, ratio in enumerate(one.ratios) if ratio]
        if not shown:
            continue
        bars = axes.barh(
            [below[place] for place, _ in shown],
            [ratio - 1 for _, ratio in shown],
            height=_BAR,
            left=1,
            color=[one.below if one.below and ratio < 1 else one.colour for _, ratio in shown],
            label=one.label,
        )
        for (place, _), bar in zip(shown, bars, strict=True):
            bar.set_gid(f"{one.label}-{place}")
            below[place] += _BAR
        axes.bar_label(bars, [cells.times(ratio) for _, ratio in shown], fontsize=7, padding=2)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high > _NARROW * low else (1, 1.2, 1.5, 2, 3, 5, 7))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}×"))
    axes.spines["left"].set_visible(False)
    if legend:
        legend_above(figure)
    return figure


def legend_above(figure: Figure) -> None:
    """In a row above the axes, where nothing is hidden by it."""
    figure.legend(loc="upper left", ncols=6, borderaxespad=0.2, handlelength=1.2, columnspacing=1.4)


@dataclass(frozen=True)
class Layer:
    """A part of each row's bar; None where it has none."""

    label: str
    sizes: Sequence[float | None]
    colour: str


def stacked_figure(names: Sequence[str], layers: Sequence[Layer], axis: str) -> Figure:
    """One bar a name, its parts one behind another, with the sum at the end."""
    figure, axes, middles = named_rows(names, [0.26] * len(names), axis, len(layers) > 1)
    ends = [0.0] * len(names)
    bars: Any = None
    for layer in layers:
        sizes = [size or 0.0 for size in layer.sizes]
        bars = axes.barh(middles, sizes, height=0.18, left=ends, color=layer.colour, label=layer.label)
        for place, bar in enumerate(bars):
            bar.set_gid(f"{layer.label}-{place}")
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    axes.bar_label(bars, [cells.figure(end) for end in ends], fontsize=7, padding=2)
    if len(layers) > 1:
        legend_above(figure)
    return figure
