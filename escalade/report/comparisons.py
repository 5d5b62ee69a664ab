"""Tables of a network's times beside its peers', by one clock each: on the device, and of a user's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escalade.bench.peers.catalogue import TITLES
from escalade.bench.peers.comparison import Clock, against_best, by_clock, on_device, required
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.commits import told
from escalade.report.markdown import table

_ORDER = (
    "torch-eager",
    "torch-graph",
    "torch-compile-default",
    "torch-compile",
    "jax",
    "onnxruntime",
    "tensorrt",
)
SYSTEMS = {name: TITLES[name] for name in _ORDER}
"""The peers of whole networks, in the order of their columns."""
DTYPES = ("fp16", "bf16", "fp8", "tf32", "fp32")
Figures = dict[str, Callable[[Record], str]]
"""Further columns of our own record, by heading."""

IMAGES: Figures = {
    "images/s": lambda r: cells.whole(r.images_per_s),
    "× floor": cells.over_floor,
    "error": lambda r: cells.error(r.error),
}
ROWS: Figures = {
    "rows/s": lambda r: cells.whole(r.images_per_s),
    "GB/s": lambda r: cells.whole(r.gbps),
    "% of a copy": lambda r: cells.percent(r.copy_pct),
    "error": lambda r: cells.error(r.error),
}


@dataclass(frozen=True)
class Compared:
    """One dtype and batch: every record of it."""

    dtype: str
    batch: int
    records: tuple[Record, ...]

    def of(self, system: str) -> Record | None:
        return next((r for r in self.records if r.system == system), None)


def compared(records: Sequence[Record]) -> list[Compared]:
    """What was measured of ours, by dtype and batch."""
    keys = {(r.dtype, r.batch) for r in records if not r.is_peer}
    return [
        Compared(dtype, batch, tuple(r for r in records if (r.dtype, r.batch) == (dtype, batch)))
        for dtype, batch in sorted(keys, key=lambda key: (DTYPES.index(key[0]), key[1]))
    ]


def device_table(records: Sequence[Record], figures: Figures) -> str:
    """One replay of each system's CUDA graph; what has none (eager PyTorch, JAX) is in the table of calls."""
    return _table(records, on_device, figures)


def call_table(records: Sequence[Record]) -> str:
    """What a user's call takes by the clock, from an idle GPU until the result is there."""
    return _table(records, by_clock, {})


def _table(records: Sequence[Record], clock: Clock, figures: Figures) -> str:
    found = [
        one for one in compared(records) if any(clock(r) is not None and not r.is_peer for r in one.records)
    ]
    needed = {
        name
        for one in found
        for r in one.records
        if not r.is_peer
        for group in required(r, clock)
        for name in group
    }
    shown = {r.system for one in found for r in one.records if clock(r) is not None or r.failure} | needed
    systems = [name for name in SYSTEMS if name in shown and _may_have(name, clock)]
    rows = []
    for one, commit in zip(found, told([one.records for one in found]), strict=True):
        ours = one.of("escalade")
        assert ours is not None
        rows.append(
            (one.dtype, f"{one.batch:,}", f"**{cells.figure(clock(ours))}**",
             *(cells.time_or_reason(one.of(name), clock) for name in systems),
             cells.against(against_best(one.records, clock)), *(cell(ours) for cell in figures.values()), commit)
        )  # fmt: skip
    header = (
        "dtype",
        "batch",
        "Escalade",
        *(SYSTEMS[name] for name in systems),
        "vs best peer",
        *figures,
        "commit",
    )
    return table(header, rows, left=2)


def _may_have(system: str, clock: Clock) -> bool:
    return clock is by_clock or system not in ("torch-eager", "jax")


def overview(records: Sequence[Record]) -> str:
    """Ours beside the best peer, on the device and by the clock, in a row each."""
    rows = []
    every = compared(records)
    for one, commit in zip(every, told([one.records for one in every]), strict=True):
        row = [one.dtype, f"{one.batch:,}"]
        for clock in (on_device, by_clock):
            found = against_best(one.records, clock)
            mine = f"**{cells.figure(clock(found.ours))}**" if found.ours else ""
            best = found.peer
            theirs = f"{cells.figure(clock(best))} ({SYSTEMS.get(best.system, best.system)})" if best else ""
            row += [mine, theirs, cells.against(found)]
        rows.append([*row, commit])
    header = (
        "dtype", "batch", "Escalade, µs on the device", "best peer measured", "vs best peer",
        "Escalade, µs a call", "best peer measured", "vs best peer", "commit",
    )  # fmt: skip
    return table(header, rows, left=2)


def memory_table(records: Sequence[Record]) -> str:
    """What each needs at most, in MiB: ours beside each peer's, and as a share of the peer's that needs least."""
    rows = []
    found = compared(records)
    systems = [name for name in SYSTEMS if any(_bytes(one.of(name)) for one in found)]
    for one, commit in zip(found, told([one.records for one in found]), strict=True):
        ours, peers = _bytes(one.of("escalade")), [_bytes(one.of(name)) for name in systems]
        least = min(filter(None, peers), default=None)
        share = ours / least if ours and least else None
        rows.append(
            (one.dtype, f"{one.batch:,}", *map(mebibytes, (ours, *peers)), cells.share(share), commit)
        )
    header = (
        "dtype", "batch", "Escalade", *(SYSTEMS[name] for name in systems), "share of the least", "commit",
    )  # fmt: skip
    return table(header, rows, left=2)


def _bytes(record: Record | None) -> int | None:
    return record.peak_bytes if record else None


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"
