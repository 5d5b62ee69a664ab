"""The answer first: each workload beside its best peer and its floor, and what sets of networks and layers come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.layers import summaries
from escalade.bench.layers.sets import DIRECTIONS
from escalade.bench.peers.catalogue import TITLES
from escalade.bench.peers.comparison import Against, against_best, by_clock, on_device
from escalade.measure.records import Record
from escalade.report import cells, coverage_rows, training_pages
from escalade.report.comparisons import Compared, compared
from escalade.report.layer_pages import Found
from escalade.report.markdown import table
from escalade.report.network_pages import COMPARED, networks, of_network

Text = Callable[[Sequence[Record]], str]
"""Markdown of one GPU's records."""
_HEADER = (
    "workload", "dtype", "batch", "best peer", "µs", "peer's µs", "vs best peer", "floor, µs", "× floor", "µs a call",
    "vs best peer, a call", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A workload in one dtype and batch, on the device and by the clock."""

    workload: str
    one: Compared

    @property
    def device(self) -> Against:
        return against_best(self.one.records, on_device)

    @property
    def call(self) -> Against:
        return against_best(self.one.records, by_clock)


def rows(records: Sequence[Record]) -> Iterator[Row]:
    """Networks, then steps of training, of one GPU."""
    for name in networks(records):
        own = of_network(records, name)
        for suffix in COMPARED:
            for one in compared([r for r in own if r.workload == name + suffix]):
                yield Row(name + suffix, one)
    for steps in training_pages.measured(records):
        for one in compared(steps):
            yield Row(steps[0].workload, one)


def text(records: Sequence[Record]) -> str:
    """What one GPU's records say, as Markdown."""
    found = list(rows(records))
    made = [f"- {sentence}\n" for sentence in sentences(found, records)]
    if found:
        made += ["\n", table(_HEADER, map(_cells, found), left=4)]
    return "".join(made)


def sentences(found: Sequence[Row], records: Sequence[Record]) -> Iterator[str]:
    """One for the networks, one for each set of many networks, and one for each set of layers."""
    for what, ratios in (
        ("on the device", [row.device.ratio for row in found]),
        ("by the clock", [row.call.ratio for row in found]),
    ):
        known = [ratio for ratio in ratios if ratio]
        if known:
            yield (
                f"**Networks and steps, {what}**: {sum(ratio >= 1 for ratio in known)} of {len(known)} no slower than "
                f"the best of all peers, {statistics.geometric_mean(known):.2f}× as fast in the geometric mean, "
                f"{min(known):.2f}× at worst; {len(ratios) - len(known)} more lack a peer."
            )
    for part in coverage_rows.parts(records):
        yield f"**{part.title}**: {part.summary()}"
    for direction in DIRECTIONS:
        layers = Found.of(direction, records)
        for layer_set in layers.parts():
            total = summaries.summary(layers.rows(layer_set))
            if total:
                yield f"**Layers of {layer_set.title}**: {total}."


def _cells(row: Row) -> tuple[str, ...]:
    device, call = row.device, row.call
    ours, peer = device.ours or call.ours, device.peer
    on_floor = device.ours
    return (
        row.workload, row.one.dtype, f"{row.one.batch:,}", TITLES.get(peer.system, peer.system) if peer else "",
        f"**{cells.microseconds(device.ours)}**" if device.ours else "", cells.microseconds(peer) if peer else "",
        cells.against(device), cells.figure(on_floor.floor_us) if on_floor else "",
        cells.over_floor(on_floor) if on_floor else "", cells.figure(by_clock(call.ours)) if call.ours else "",
        cells.against(call), ours.commit if ours else "",
    )  # fmt: skip
