"""Networks as pictures: beside each peer, and over the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from escalade.bench.peers.catalogue import TITLES
from escalade.bench.peers.comparison import on_device
from escalade.measure.records import Record
from escalade.report import network_pages
from escalade.report.html.bars import Series, ratio_figure
from escalade.report.html.section import CardRecords, Picture
from escalade.report.html.svg import BLUE, GOLD, GREEN, GREY, PURPLE, inline
from escalade.report.html.verdict import Row, rows
from escalade.report.network_plots import network_figure

PEERS = {
    "torch-eager": GREY,
    "torch-graph": BLUE,
    "torch-compile-default": GREEN,
    "torch-compile": PURPLE,
    "jax": GOLD,
}
"""The peers of networks, and the colours of their bars."""


def pictures(records: CardRecords) -> Iterator[Picture]:
    """Each network beside its peers, and over the batch where it was measured at several."""
    for gpu, own in records.items():
        yield from beside_peers(
            f"networks-{gpu}", [row for row in rows(own) if not row.is_training], own[0].gpu
        )
        for name in network_pages.networks(own):
            shown = network_pages.plotted(own, name)
            if len({r.batch for r in shown if r.workload == name and r.images_per_s}) > 1:
                title = f"{name} by batch, on {own[0].gpu}"
                yield Picture(
                    title, inline(partial(_over_batch, shown, name), f"batches-{gpu}-{name}", title)
                )


def _over_batch(records: Sequence[Record], name: str) -> Figure:
    figure: Figure = network_figure(records, name, columns=1)
    figure.suptitle("")  # the page has it
    return figure


def beside_peers(key: str, found: Sequence[Row], card: str) -> Iterator[Picture]:
    """A picture for each workload, with a bar for each peer that was timed on the device."""
    for workload in dict.fromkeys(row.workload for row in found):
        own = [row for row in found if row.workload == workload]
        drawn = peer_bars(own, _ratio, "times as fast as the peer, on the device")
        if drawn is not None:
            title = f"{workload} beside each peer, on {card}"
            yield Picture(title, inline(drawn, f"{key}-{workload}", title))


def peer_bars(
    found: Sequence[Row], ratio: Callable[[Row, str], float | None], axis: str
) -> Callable[[], Figure] | None:
    """What draws a bar for each row of a workload and each peer that has a ratio; None where none has."""
    shown = [row for row in found if any(ratio(row, name) for name in PEERS)]
    series = [
        Series(TITLES[name], [ratio(row, name) for row in shown], colour)
        for name, colour in PEERS.items()
        if any(ratio(row, name) for row in shown)
    ]
    names = [f"{row.one.dtype}, batch {row.one.batch:,}" for row in shown]
    return partial(ratio_figure, names, series, axis) if shown else None


def _ratio(row: Row, system: str) -> float | None:
    ours, peer = row.device.ours, row.one.of(system)
    mine, theirs = on_device(ours) if ours else None, on_device(peer) if peer else None
    return theirs / mine if mine and theirs else None
