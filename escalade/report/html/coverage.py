"""Many networks as a picture: how each stands beside PyTorch's CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from escalade.bench.peers.comparison import on_device
from escalade.report.coverage_rows import Part
from escalade.report.html.bars import Series, ratio_figure

_FASTER, _SLOWER = "#3f8f5f", "#c2542d"


def ratios(part: Part) -> list[tuple[str, float]]:
    """The networks that both were timed on, the fastest first."""
    found = [(row.network, ratio) for row in part.rows if (ratio := row.over_graph(on_device))]
    return sorted(found, key=lambda pair: -pair[1])


def coverage_figure(found: Sequence[tuple[str, float]], title: str) -> Figure:
    """A bar a network."""
    names, values = zip(*found, strict=True)
    series = Series("network", values, _FASTER, _SLOWER)
    return ratio_figure(names, [series], "times as fast as PyTorch's CUDA graph, on the device", title)
