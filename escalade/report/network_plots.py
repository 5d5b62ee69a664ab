"""A network's figures as a picture."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from escalade import files
from escalade.bench.peers.comparison import by_clock, on_device
from escalade.errors import UnsupportedError
from escalade.measure.records import Record
from escalade.report.op_time_pages import OpTimes, op_times
from escalade.report.rows import of_rows

_COLOURS = {
    "escalade": "#c2542d",
    "torch-eager": "#b9bdc4",
    "torch-graph": "#2f6db5",
    "torch-compile": "#7a52a8",
    "torch-compile-default": "#b79ad6",
    "jax": "#3d8f5f",
}


PICTURES = (".png", ".svg", ".pdf")
"""How the names of files end that pictures are written as."""
Draw = Callable[[Any], None]


def network_plot(records: Sequence[Record], workload: str, path: pathlib.Path) -> pathlib.Path:
    """The picture of a network as a file."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "escalade"  # the same records give the same file
    if path.suffix not in PICTURES:
        raise UnsupportedError(
            f"{path.name}: plots are written as {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    contents = io.BytesIO()
    network_figure(records, workload).savefig(
        contents,
        format=path.suffix.removeprefix("."),
        dpi=150,
        metadata={"Date": None} if path.suffix == ".svg" else None,
    )
    files.replace(path, contents.getvalue())
    return path


def network_figure(records: Sequence[Record], workload: str, columns: int | None = None) -> Any:
    """A panel for each dtype, every system over the batch; further ones for phases, or for op times. All stand in one
    row, or in rows of so many columns."""
    from matplotlib.figure import Figure

    panels = _panels(records, workload)
    if not panels:
        raise UnsupportedError("there is nothing to plot: nothing was timed")
    across = min(len(panels), columns or len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.6 * across, 3.8 * down), layout="constrained")
    for place, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(down, across, place))
    gpu = next(record.gpu for record in records if record.workload.startswith(workload))
    figure.suptitle(f"{workload} on {gpu}", fontsize=11)
    return figure


def _panels(records: Sequence[Record], workload: str) -> list[Draw]:
    batches = [r for r in records if r.workload == workload and r.images_per_s]
    phases = [r for r in records if r.workload == f"{workload}_phases" and r.wall_us]
    over_batch = _times if of_rows(batches) else _throughput if len({r.batch for r in batches}) > 1 else _bars
    found: list[Draw] = []
    if workload == "lenet":
        found += [partial(_op_times, found=table) for table in op_times(records) if not table.form]
    for draw, own in ((over_batch, batches), (_latency, phases)):
        for dtype in dict.fromkeys(record.dtype for record in own):
            found.append(partial(draw, records=[r for r in own if r.dtype == dtype], dtype=dtype))
    return found


def _times(axes: Any, records: Sequence[Record], dtype: str) -> None:
    """Draws times on the device with a line, by the clock with a dotted one."""
    for system in dict.fromkeys(record.system for record in records):
        own = sorted((r for r in records if r.system == system), key=lambda r: r.batch)
        colour = _COLOURS.get(system)
        times = [(r.batch, time) for r in own if (time := on_device(r)) is not None]
        calls = [(r.batch, time) for r in own if (time := by_clock(r)) is not None]
        if times:
            axes.plot(*zip(*times, strict=True), marker="o", markersize=4, label=system, color=colour)
        if calls:
            label = None if times else f"{system}, by the clock"
            axes.plot(
                *zip(*calls, strict=True), linestyle=":", marker=".", markersize=3, color=colour, label=label
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch")
    axes.set_ylabel("µs (dotted: a call by the clock)")
    axes.set_title(dtype, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Any, records: Sequence[Record], dtype: str) -> None:
    """Draws the rates at one batch: those on the device, or of a CPU."""
    records = [record for record in records if on_device(record) is not None] or records
    rates = [record.images_per_s or 0.0 for record in records]
    systems = [record.system for record in records]
    bars = axes.bar(systems, rates, color=[_COLOURS.get(system) for system in systems])
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], fontsize=8, padding=2)
    axes.set_ylabel("images/s")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{dtype}, batch {records[0].batch:,}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _op_times(axes: Any, found: OpTimes) -> None:
    """Both convolutions of every variant, one behind the other."""
    positions = range(len(found.variants))
    first = [variant.first / 1000 for variant in found.variants]
    second = [variant.second / 1000 for variant in found.variants]
    axes.barh(positions, first, color="#2f6db5", label="op time 1")
    bars = axes.barh(positions, second, left=first, color="#c2542d", label="op time 2")
    axes.bar_label(bars, [f"{variant.sum / 1000:.3g}" for variant in found.variants], fontsize=7, padding=2)
    axes.set_yticks(positions, [variant.name for variant in found.variants], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms")
    axes.set_title(f"{found.storage}, {found.batch:,} images", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _throughput(axes: Any, records: Sequence[Record], dtype: str) -> None:
    """Draws throughput on the device with a line; what has no time there by the clock, with a dotted one."""
    for system in dict.fromkeys(record.system for record in records):
        points = sorted((r.batch, r.images_per_s or 0.0) for r in records if r.system == system)
        batches, rates = zip(*points, strict=True)
        timed = any(on_device(r) is not None for r in records if r.system == system)
        axes.plot(
            batches, rates, marker="o", markersize=4, color=_COLOURS.get(system), linestyle="-" if timed else ":",
            label=system if timed else f"{system}, by the clock",
        )  # fmt: skip
    ticks = sorted({record.batch for record in records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("batch")
    axes.set_ylabel("images/s")
    axes.set_title(dtype, fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _latency(axes: Any, records: Sequence[Record], dtype: str) -> None:
    times = [(record.wall_us or 0.0) / 1e3 for record in records]
    bars = axes.bar(range(len(records)), times, color=_COLOURS["escalade"])
    axes.bar_label(bars, [f"{time:.3g}" for time in times], fontsize=8, padding=2)
    axes.set_xticks(range(len(records)), [record.rung for record in records], rotation=30, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("ms, host to host")
    axes.set_title(f"one image, phase by phase ({dtype})", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
