"""Plots as figures of matplotlib: files for the docs, and inline SVG in the page's own colors for HTML."""

from __future__ import annotations

import io
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from escalade import files
from escalade.errors import UnsupportedError
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import by_clock, on_device
from escalade_bench.report.compare import grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of the files that plots are written to."""
_INK = "#010203"
"""Placeholder for the page's text color, replaced when the plot is embedded."""
BLUE, GOLD, RED, PURPLE, GREEN, GREY = "#2f6db5", "#b58a1b", "#c2542d", "#7a52a8", "#3f8f5f", "#8a8f98"
_DTYPE = {"fp32": BLUE, "tf32": PURPLE, "fp16": RED, "bf16": GOLD, "fp8": GREEN, "int8": GREY}
_SYSTEM = {
    "escalade": RED, "torch-eager": GREY, "torch-graph": BLUE, "torch-compile": PURPLE,
    "torch-compile-default": GREEN, "jax": GOLD,
}  # fmt: skip
_NAMES = ("blue", "gold", "red", "purple", "green", "grey")
_ON_PAGE = {_INK: "currentColor"} | {
    color: f"var(--{name})"
    for name, color in zip(_NAMES, (BLUE, GOLD, RED, PURPLE, GREEN, GREY), strict=True)
}
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "escalade",  # reproducible files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
_INLINE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
}
_DROPPED = re.compile(r'<metadata>.*?</metadata>|\s+xmlns(:\w+)?="[^"]*"', re.DOTALL)
_NAMED = re.compile(r'(\bid="|href="#|url\(#)')
_WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)pt"')

_MOST_PANELS = 2
"""Most panels side by side: more would be unreadable at the width of README.md."""

Draw = Callable[[], "Figure"]


def _saved(draw: Draw, kind: str, style: Mapping[Any, Any]) -> bytes:
    import matplotlib

    contents = io.BytesIO()
    with matplotlib.rc_context({**_STYLE, **style}):
        draw().savefig(contents, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return contents.getvalue()


def save(draw: Draw, path: pathlib.Path) -> pathlib.Path:
    """Write a plot to a file in the format of its suffix."""
    if path.suffix not in PICTURES:
        raise UnsupportedError(
            f"{path.name}: plots are written as {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, _saved(draw, path.suffix.removeprefix("."), {}))
    return path


def inline(draw: Draw, name: str, title: str) -> Markup:
    """Return a plot as an inline element with a unique name, in the page's font and colors."""
    drawn = _saved(draw, "svg", _INLINE).decode()
    drawn = _DROPPED.sub("", drawn[drawn.index("<svg") :]).replace("xlink:href", "href")
    drawn = _NAMED.sub(rf"\g<1>{re.sub(r'[^A-Za-z0-9_-]', '-', name)}-", drawn)
    drawn = re.sub("|".join(_ON_PAGE), lambda color: _ON_PAGE[color[0]], drawn)
    inches = float(_WIDTH.search(drawn)[1]) / 72  # type: ignore[index]
    opened = f'<svg role="img" aria-label="{escape(title)}" style="--inches: {inches:g}"'
    return Markup(drawn.replace("<svg", opened, 1))


def _figure(width: float, height: float, title: str = "") -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    return figure, axes


_MOST_LINEAR = 50
"""Largest ratio of two bars that an axis from zero shows; above it the axis is logarithmic."""
_LOG = ", log scale"


def _scale(axes: Any, values: Sequence[float], label: str) -> None:
    """Start the bars at zero; if the smallest would be invisible, use a labeled logarithmic axis."""
    found = [value for value in values if value > 0]
    if not found or max(found) <= _MOST_LINEAR * min(found):
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel(label)
        return
    axes.set_yscale("log")
    axes.set_ylim(10.0 ** math.floor(math.log10(0.5 * min(found))))  # keeps the smallest bar visible
    _plain_ticks(axes.yaxis)
    axes.set_ylabel(label + _LOG)


def _plain_ticks(axis: Any, unit: str = "") -> None:
    """Label 1, 2 and 5 of every decade of a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}{unit}" if v >= 1 else f"{v:g}{unit}"))
    axis.set_minor_formatter(NullFormatter())


def climb(
    steps: Sequence[Record], ceilings: Mapping[str, float], peers: Mapping[str, Record], title: str = ""
) -> Figure:
    """Plot GFLOP/s of every rung from the naive one up, with the card's ceilings and the best peers as lines."""
    figure, axes = _figure(9.5, 4.8, title)
    rates = [1000 * (r.tflops or math.nan) for r in steps]
    for dtype in dict.fromkeys(r.dtype for r in steps):
        own = [n for n, r in enumerate(steps) if r.dtype == dtype]
        color = _DTYPE[dtype]
        bars = axes.bar(own, [rates[n] for n in own], color=color, width=0.7, label=f"rungs in {dtype}")
        bars[0].set_gid(f"climb-{dtype}")
        if dtype in ceilings:
            axes.axhline(ceilings[dtype], color=color, linewidth=1.2, label=f"ceiling {ceilings[dtype]:,.0f}")
        if dtype in peers and (tflops := peers[dtype].tflops):
            label = f"cuDNN ({peers[dtype].system}) {1000 * tflops:,.0f}"
            axes.axhline(1000 * tflops, color=color, linewidth=1.4, linestyle=":", label=label)
    axes.set_xticks(range(len(steps)), [r.rung for r in steps], rotation=55, ha="right", fontsize=7)
    _scale(axes, rates, "GFLOP/s")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def speedups(ratios: Mapping[str, float], title: str = "", wrong: Sequence[str] = ()) -> Figure:
    """Plot a bar per network, the fastest first: above the line we are faster than the best peer.

    Networks with incorrect results follow, marked in red.
    """
    ordered = [*sorted(ratios.items(), key=lambda pair: -pair[1]), *((name, 1.0) for name in wrong)]
    names, values = zip(*ordered, strict=True)
    figure, axes = _figure(max(4.0, min(11.0, 1.5 + 0.32 * len(names))), 3.8, title)
    colors = [GREEN if value >= 1 else RED for value in values]
    heights = [value - 1 for value in values]
    bars = axes.bar(range(len(names)), heights, bottom=1, color=colors, width=0.75)
    bars[0].set_gid("networks")
    if len(names) <= 40:
        labels = [f"{value:.1f}×" for value in values[: len(ratios)]] + [""] * len(wrong)
        axes.bar_label(bars, labels, fontsize=6, padding=1)
    for number in range(len(ratios), len(names)):
        axes.annotate(
            "not right", (number, 1.05), color=RED, rotation=90, ha="center", va="bottom", fontsize=6
        )
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=55, ha="right", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(min(0.8, *values), 1.2 * max(values))
    _plain_ticks(axes.yaxis, "×")
    axes.set_ylabel("best peer's time / ours" + _LOG)
    return figure


def by_batch(records: Sequence[Record], title: str = "") -> Figure:
    """Plot a panel per dtype: images per second over the batch size by device time; dotted by the wall clock."""
    from matplotlib.figure import Figure

    timed = [r for r in records if r.images_per_s]
    if not timed:
        raise UnsupportedError("there is nothing to plot: nothing was timed")
    panels = grouped(timed, lambda r: r.dtype)
    if len({r.batch for r in timed}) == 1:
        return _of_one_batch(panels, title)
    across = min(_MOST_PANELS, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.6 * across, 3.8 * down), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for place, (dtype, own) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(down, across, place)
        for system, some in grouped(own, lambda r: r.system).items():
            color = _SYSTEM.get(system)
            for clock, line in ((on_device, "o-"), (by_clock, "o:")):
                points = sorted((r.batch, r.batch / time * 1e6) for r in some if (time := clock(r)))
                label = None if clock is by_clock and any(map(on_device, some)) else system
                if points:
                    gid = f"{dtype}-{system}{line}"
                    axes.plot(
                        *zip(*points, strict=True), line, markersize=3, color=color, label=label, gid=gid
                    )
        batches = sorted({r.batch for r in own})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches], rotation=45)
        unit = "rows/s" if own[0].layout == "flat" else "images/s"
        axes.set(xlabel="batch", ylabel=unit + _LOG, title=dtype)
        axes.legend()
    return figure


def _of_one_batch(panels: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Plot bars by dtype and system: images per second by device time, or by the wall clock without one."""
    first = next(iter(panels.values()))[0]
    figure, axes = _figure(7.0, 3.6, f"{title}, batch {first.batch:,}".removeprefix(", "))
    rates: dict[str, dict[int, float]] = {}
    for place, own in enumerate(panels.values()):
        for r in own:
            if time := on_device(r) or by_clock(r):
                some = rates.setdefault(r.system, {})
                some[place] = max(some.get(place, 0.0), r.batch / time * 1e6)
    width = 0.8 / len(rates)
    for number, (system, some) in enumerate(rates.items()):
        places = [place + (number - (len(rates) - 1) / 2) * width for place in some]
        on_clock = not any(on_device(r) for own in panels.values() for r in own if r.system == system)
        label = f"{system}, wall clock" if on_clock else system
        bars = axes.bar(places, [*some.values()], width=0.9 * width, color=_SYSTEM.get(system), label=label)
        bars[0].set_gid(f"one-batch-{system}")
    axes.set_xticks(range(len(panels)), [*panels])
    _scale(
        axes,
        [rate for some in rates.values() for rate in some.values()],
        "rows/s" if first.layout == "flat" else "images/s",
    )
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def learning(run: Record) -> Figure:
    """Plot the loss of each step, and of the test images after each epoch."""
    figure, axes = _figure(6.4, 3.2)
    losses, judged = run.config["losses"], [(step, loss) for step, loss, _ in run.config["evaluations"]]
    axes.plot(*zip(*losses, strict=True), color=BLUE, linewidth=1.2, label="training", gid="losses")
    if judged:
        axes.plot(*zip(*judged, strict=True), "o", color=RED, markersize=3.5, label="test images")
    is_log = all(loss > 0 and math.isfinite(loss) for _, loss in (*losses, *judged))
    axes.set_yscale("log" if is_log else "linear")
    axes.set(xlabel="step", ylabel="loss" + (_LOG if is_log else ""))
    axes.legend()
    return figure
