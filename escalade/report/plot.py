"""The climb as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from escalade.measure.records import Record
from escalade.report import cells

COLOURS = {
    "fp32": "#2f6db5",
    "tf32": "#7a52a8",
    "fp16": "#c2542d",
    "bf16": "#b58a1b",
    "fp8": "#3f8f5f",
    "peer": "#8a8f98",
}


def ladder_plot(climb: Sequence[Record], problem: str, path: pathlib.Path) -> pathlib.Path:
    """Bars from the foot to the summit, GFLOP/s on a logarithmic axis; peers in grey on top."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "escalade"  # the same records give the same file
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    shown = [record for record in climb if record.tflops]
    labels = [f"{cells.who(record)} ({record.dtype}, {record.layout})" for record in shown]
    colours = [COLOURS["peer" if record.system != "escalade" else record.dtype] for record in shown]
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.3 * len(shown)), layout="constrained")
    bars = axes.barh(range(len(shown)), [1000 * (record.tflops or 0.0) for record in shown], color=colours)
    axes.bar_label(bars, [cells.gflops(record) for record in shown], padding=3, fontsize=8)
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("GFLOP/s")
    axes.set_title(f"{problem} on {shown[0].gpu}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    used = dict.fromkeys("peer" if record.system != "escalade" else record.dtype for record in shown)
    axes.legend(handles=[Patch(color=COLOURS[name], label=name) for name in used], fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
