"""Many networks as a picture: how each stands beside the best of its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from escalade.bench.peers.comparison import on_device
from escalade.report.coverage_rows import parts
from escalade.report.html.bars import Series, ratio_figure
from escalade.report.html.section import CardRecords, Picture
from escalade.report.html.svg import GREEN, RED, inline


def pictures(records: CardRecords) -> Iterator[Picture]:
    """One for each module, dtype and batch."""
    for gpu, own in records.items():
        for number, part in enumerate(parts(own)):
            found = sorted(part.ratios(on_device).items(), key=lambda pair: -pair[1])
            if found:
                title = f"{part.title}, on {own[0].gpu}"
                yield Picture(
                    title, inline(partial(coverage_figure, found), f"coverage-{gpu}-{number}", title)
                )


def coverage_figure(found: Sequence[tuple[str, float]]) -> Figure:
    """A bar a network, in this order."""
    names, values = zip(*found, strict=True)
    series = Series("network", values, GREEN, RED)
    return ratio_figure(names, [series], "times as fast as the best peer, on the device", legend=False)
