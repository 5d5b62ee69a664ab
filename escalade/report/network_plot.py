"""A network's figures as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from escalade.bench.store import Record
from escalade.errors import UnsupportedError

_COLOURS = {
    "escalade": "#c2542d",
    "torch-eager": "#b9bdc4",
    "torch-graph": "#2f6db5",
    "torch-compile": "#7a52a8",
    "jax": "#3d8f5f",
}


def network_plot(records: Sequence[Record], workload: str, path: pathlib.Path) -> pathlib.Path:
    """A panel for each dtype, images/s over the batch for every system; and one for the latency of each phase."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "escalade"  # the same records give the same file
    import matplotlib.pyplot as plt

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UnsupportedError(f"{path.name}: plots are written as .png, .svg or .pdf")
    batches = [r for r in records if r.workload == workload and r.images_per_s]
    phases = [r for r in records if r.workload == f"{workload}_phases" and r.wall_us]
    dtypes = list(dict.fromkeys(record.dtype for record in batches))
    panels = len(dtypes) + len({record.dtype for record in phases})
    if not panels:
        raise UnsupportedError("there is nothing to plot: nothing was timed")
    figure, grid = plt.subplots(1, panels, figsize=(4.6 * panels, 3.8), layout="constrained", squeeze=False)
    axes = iter(grid[0])
    for dtype in dtypes:
        _throughput(next(axes), [r for r in batches if r.dtype == dtype], dtype)
    for dtype in dict.fromkeys(record.dtype for record in phases):
        _latency(next(axes), [r for r in phases if r.dtype == dtype], dtype)
    figure.suptitle(f"{workload} on {(batches or phases)[0].gpu}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def _throughput(axes: Any, records: Sequence[Record], dtype: str) -> None:
    for system in dict.fromkeys(record.system for record in records):
        points = sorted((r.batch, r.images_per_s or 0.0) for r in records if r.system == system)
        batches, rates = zip(*points, strict=True)
        axes.plot(batches, rates, marker="o", markersize=4, label=system, color=_COLOURS.get(system))
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
