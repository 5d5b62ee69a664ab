"""Each workload beside its best peer and its floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.peers.catalogue import TITLES
from escalade.bench.peers.comparison import TRAINING_STEP, Against, against_best, by_clock, on_device
from escalade.measure.records import Record
from escalade.report import cells, training_pages
from escalade.report.comparisons import Compared, compared
from escalade.report.markdown import table
from escalade.report.network_pages import COMPARED, networks, of_network

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
    def is_training(self) -> bool:
        """Whether it is a whole step of training."""
        return self.workload.endswith(TRAINING_STEP)

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


def text(found: Sequence[Row]) -> str:
    """A row each, as Markdown."""
    return table(_HEADER, map(_cells, found), left=4) if found else "No network is recorded yet.\n"


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
