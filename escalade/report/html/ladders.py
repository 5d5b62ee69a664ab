"""A ladder as pictures: what each rung was predicted and measured to gain, and where it stands below the roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from escalade.measure.records import Record
from escalade.report.html.bars import WIDTH, Series, legend_above, ratio_figure
from escalade.report.html.svg import BLUE, GOLD
from escalade.report.ladder_pages import climb
from escalade.report.operation_pages import fastest, of_workload, problems
from escalade.report.plot import COLOURS

_ASIDE, _LETTER, _LINE = 0.01, 0.012, 0.04
"""Shares of the picture: a name's distance from its point, the width of a letter, the height of a line."""


def main_problem(records: Sequence[Record], operation: str) -> str:
    """The problem on which most rungs have a gain, the first of several; empty if nothing was measured."""
    measured = problems(of_workload(records, operation))
    return max(measured, key=lambda name: len(gains(records, operation, name)), default="")


def gains(records: Sequence[Record], operation: str, problem: str) -> list[Record]:
    """The rungs of a problem that have a gain over the rung below, measured, predicted or both."""
    return [r for r in climb(records, operation, problem) if not r.is_peer and (r.gain or r.predicted_gain)]


def gain_figure(found: Sequence[Record]) -> Figure:
    """Two bars a rung, from the foot to the summit."""
    names = [f"{r.rung} ({r.dtype}, {r.layout})" for r in found]
    series = (
        Series("measured", [r.gain for r in found], BLUE),
        Series("predicted", [r.predicted_gain for r in found], GOLD),
    )
    return ratio_figure(names, series, "times as fast as the rung below")


@dataclass(frozen=True)
class Point:
    """A record on the roofline."""

    record: Record
    intensity: float
    """Operations of the plain algorithm over the fewest bytes."""
    gflops: float


def points(records: Sequence[Record], operation: str) -> list[Point]:
    """Every rung and the best peers on every problem, where both rates are known."""
    found = [
        r for problem in problems(of_workload(records, operation)) for r in climb(records, operation, problem)
    ]
    return [Point(r, 1000 * r.tflops / r.gbps, 1000 * r.tflops) for r in found if r.tflops and r.gbps]


@dataclass(frozen=True)
class Roofs:
    """What the card can do, as far as it was recorded."""

    gbps: float | None
    gflops: dict[str, float]
    """The best matrix product, by dtype."""


def roofs(records: Sequence[Record], operation: str) -> Roofs:
    """The recorded ceilings; without them what the shares of a ceiling, taken in the same run, come to."""
    ceilings = of_workload(records, "ceilings")
    copies = [r.gbps for r in ceilings if r.gbps]
    products = {r.dtype: 1000 * r.tflops for r in ceilings if r.tflops}
    own = of_workload(records, operation)
    shares = {r.dtype: 1e5 * r.tflops / r.peak_pct for r in own if r.tflops and r.peak_pct}
    rates = [100 * r.gbps / r.copy_pct for r in own if r.gbps and r.copy_pct]
    return Roofs(max([*copies, *rates], default=None), shares | products)


def roofline_figure(found: Sequence[Point], limits: Roofs) -> Figure:
    """A point a rung and problem in the colour of its dtype, peers as crosses; the fastest rungs have their names."""
    figure = Figure(figsize=(WIDTH, 4.2))
    axes = figure.add_axes((0.165, 0.12, 0.815, 0.81))
    kinds = dict.fromkeys("peer" if point.record.is_peer else point.record.dtype for point in found)
    for kind in kinds:
        own = [p for p in found if ("peer" if p.record.is_peer else p.record.dtype) == kind]
        axes.scatter(
            [p.intensity for p in own],
            [p.gflops for p in own],
            s=22,
            marker="x" if kind == "peer" else "o",
            alpha=0.85,
            color=COLOURS[kind],
            label=kind,
            gid=f"points-{kind}",
        )
    _draw_roofs(axes, found, limits)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.1)
    _write_names(axes, _named(found))
    for line in (axes.xaxis, axes.yaxis):
        line.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        )
        line.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOP a byte, of the plain algorithm over the fewest bytes")
    axes.set_ylabel("GFLOP/s")
    axes.grid()
    axes.set_axisbelow(True)
    legend_above(figure)
    return figure


def _named(found: Sequence[Point]) -> list[Point]:
    """The fastest rungs of the problems, each where it is the highest."""
    best = [
        fastest(p.record for p in found if p.record.problem == problem and not p.record.is_peer)
        for problem in problems(p.record for p in found)
    ]
    highest: dict[str, Point] = {}
    for point in found:
        known = highest.get(point.record.rung)
        if any(point.record is one for one in best) and (known is None or point.gflops > known.gflops):
            highest[point.record.rung] = point
    return list(highest.values())


def _write_names(axes: Any, found: Sequence[Point]) -> None:
    """Each beside its point, or as far above it as no other name is."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # from here on points stay where they are
    taken: list[tuple[float, float, float]] = []
    for point in sorted(found, key=lambda one: one.gflops):
        place = (point.intensity, point.gflops)
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(place))
        across, up, wide = across + _ASIDE, up + _ASIDE, _LETTER * len(point.record.rung)
        while any(
            left < across + wide and across < left + long and abs(height - up) < _LINE
            for left, height, long in taken
        ):
            up += _LINE / 4
        taken.append((across, up, wide))
        axes.text(across, up, point.record.rung, transform=axes.transAxes, fontsize=7)


def _draw_roofs(axes: Any, found: Sequence[Point], limits: Roofs) -> None:
    low, high = min(p.intensity for p in found) / 2, max(p.intensity for p in found) * 2
    for dtype in dict.fromkeys(p.record.dtype for p in found):
        level = limits.gflops.get(dtype)
        if level is None:
            continue
        ridge = level / limits.gbps if limits.gbps else low
        across = [x for x in (low, ridge, high) if low <= x <= high]
        heights = [min(level, x * limits.gbps) if limits.gbps else level for x in across]
        axes.plot(across, heights, color=COLOURS[dtype], linewidth=1, linestyle="--", gid=f"roof-{dtype}")


def roof_sentence(limits: Roofs) -> str:
    """Which roofs are drawn, or that none was recorded."""
    known = [f"{level / 1000:,.0f} TFLOP/s in {dtype}" for dtype, level in limits.gflops.items()]
    if limits.gbps:
        known.append(f"a copy's {limits.gbps:,.0f} GB/s")
    if not known:
        return "The records of this ladder hold no ceilings, so that no roof is drawn."
    return f"Dashed: the ceilings that were measured, {', '.join(known)}."
