"""Select the records of a table, and compare our times and memory with all peers', each by one clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from escalade_bench.measure.records import Record, gpu_folder
from escalade_bench.peers.comparison import Against, Clock, against_best, by_clock, on_device
from escalade_bench.peers.registry import TITLES
from escalade_bench.report import cells
from escalade_bench.report.table import Column, Table, columns, text

K = TypeVar("K")
R = TypeVar("R")
PREFERRED_GPU = "h200"
"""The GPU whose figures README.md shows."""
DTYPES = ("fp16", "bf16", "int8", "fp8", "tf32", "fp32")
Cards = Mapping[str, Sequence[Record]]
"""Records of cards, by GPU folder, the preferred one first."""


def named(plot: str, record: Record) -> str:
    """Return a plot's name, with the card's name unless it is README's GPU."""
    folder = gpu_folder(record.gpu)
    return plot if folder == PREFERRED_GPU else f"{plot}-{folder}"


def of(records: Iterable[Record], *workloads: str) -> list[Record]:
    return [record for record in records if record.workload in workloads]


def grouped(records: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    found: dict[K, list[R]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def place(name: str, order: Sequence[str] = DTYPES) -> int:
    return order.index(name) if name in order else len(order)


@dataclass(frozen=True)
class Compared:
    """One problem in one dtype: our record and the peers'."""

    records: tuple[Record, ...]

    @cached_property
    def ours(self) -> Record:
        return next(r for r in self.records if not r.is_peer)

    def of(self, system: str) -> Record | None:
        return next((r for r in self.records if r.system == system), None)

    @cached_property
    def device(self) -> Against:
        return against_best(self.records, on_device)

    @cached_property
    def call(self) -> Against:
        return against_best(self.records, by_clock)

    def by(self, clock: Clock) -> Against:
        return self.device if clock is on_device else self.call


def compared(records: Iterable[Record]) -> list[Compared]:
    """Return our records by dtype and batch, with all peers' records of the same problem."""
    found = []
    for own in grouped(records, lambda r: r.comparison).values():
        peers = [r for r in own if r.is_peer]
        for ours in grouped((r for r in own if not r.is_peer), lambda r: r.layout).values():
            found.append(Compared((*ours, *peers)))
    return sorted(found, key=lambda one: (place(one.ours.dtype), one.ours.batch))


SYSTEMS = (
    "torch-eager", "torch-graph", "torch-compile-default", "torch-compile", "jax",
)  # fmt: skip
"""The peers of whole networks, in the order of their columns."""
LEGEND = (
    "*vs best peer* is the time of the fastest peer divided by ours, by the same clock: above 1× we are faster. The "
    "best peer is the best of all that were measured with the same PyTorch, CUDA and cuDNN, of any commit; *note* "
    "names a peer that matters and is missing. PyTorch eager and JAX have no CUDA graph, and so no device time: where "
    "their calls in a row, by the wall clock, beat all device times, the ratio over them is an upper bound, as *note* "
    "says. *measured* is the commit and the day of our figure."
)


def of_rows(records: Sequence[Record]) -> bool:
    """Return whether the network takes rows of numbers, not images."""
    return any(record.layout == "flat" for record in records)


def ours(row: Compared) -> Record:
    return row.ours


def behind(row: Compared) -> tuple[Record, ...]:
    return row.records


def times(rows: Sequence[Compared], clock: Clock, systems: Sequence[str] = SYSTEMS) -> list[Column]:
    """Columns: our time, every peer's (or why it has none), the best peer, and the ratio."""

    def timed(system: str) -> bool:
        found = [record for row in rows if (record := row.of(system))]
        return any(clock(r) is not None or r.failure for r in found) and (
            clock is by_clock or any(on_device(r) for r in found)
        )

    def peers(system: str) -> Column:
        return Column(TITLES.get(system, system), lambda row: cells.time_or_reason(row.of(system), clock))

    return [
        Column("Escalade", lambda row: cells.time_or_reason(row.ours, clock), style="bold"),
        *(peers(system) for system in systems if timed(system)),
        text("best peer", lambda row: cells.peer(row.by(clock).peer)),
        Column("vs best peer", lambda row: cells.times(row.by(clock).ratio)),
    ]


def note(clock: Clock) -> Column:
    return text("note", lambda row: row.by(clock).note)


def comparison(records: Sequence[Record], clock: Clock, title: str, more: Sequence[Column] = ()) -> Table:
    """Return one row per dtype and batch that we timed by this clock."""
    rows = [one for one in compared(records) if clock(one.ours) is not None or one.ours.failure]
    named = "dtype|layout|batch" if len({row.ours.layout for row in rows}) > 1 else "dtype|batch"
    shown = [*columns(named, ours), *times(rows, clock), *more, note(clock)]
    return Table(shown, rows, behind, title)


def both_clocks(records: Sequence[Record], what: str) -> list[Table]:
    """Yield tables of device times, then of wall-clock times; the first one also has our record's other figures."""
    rates = "rows/s=images/s|GB/s|% of a copy" if of_rows(records) else "images/s"
    own = columns(f"{rates}|× floor|p20–p80|error", ours)
    device = comparison(records, on_device, f"{what}, in µs of device time", own)
    call = comparison(
        records, by_clock, f"{what}, in µs per call by the wall clock", () if device.rows else own
    )
    return [table for table in (device, call) if table.rows]


def memory(records: Sequence[Record], title: str) -> Table:
    """Return the table of peak memory in MiB, with ours relative to the peers' minimum."""
    rows = [row for row in compared(records) if row.ours.peak_bytes]

    def size(row: Compared, system: str) -> int | None:
        record = row.of(system)
        return record.peak_bytes if record else None

    def peers(system: str) -> Column:
        return Column(TITLES[system], lambda row: cells.mebibytes(size(row, system)))

    def share(row: Compared) -> str:
        least = min(filter(None, (size(row, system) for system in SYSTEMS)), default=None)
        return cells.share((row.ours.peak_bytes or 0) / least) if least else ""

    shown = [
        *columns("dtype|batch|Escalade=MiB", ours),
        *map(peers, SYSTEMS),
        Column("share of the least", share),
    ]
    return Table(shown, rows, behind, title)


@dataclass(frozen=True)
class Verdict:
    """A set of comparisons by name: our speed relative to the best peer by both clocks, and what is not right."""

    title: str
    device: Mapping[str, float]
    """Ratios of device times."""
    call: Mapping[str, float]
    """Ratios of wall-clock times of a call."""
    wrong: Sequence[str]
    """Systems that failed or computed something wrong: lost, whatever its time."""
    records: Sequence[Record]

    @staticmethod
    def of(title: str, named: Iterable[tuple[str, Compared]]) -> Verdict:
        rows: dict[str, Compared] = {}
        for name, row in named:  # every row counts, including several layouts of one name
            rows[name if name not in rows else f"{name} {row.ours.problem} {row.ours.layout}"] = row
        right = {name: row for name, row in rows.items() if not row.ours.failure}
        return Verdict(
            title,
            {name: ratio for name, row in right.items() if (ratio := row.device.ratio)},
            {name: ratio for name, row in right.items() if (ratio := row.call.ratio)},
            [name for name in rows if name not in right],
            [row.ours for row in rows.values()],
        )

    @property
    def names(self) -> set[str]:
        return {*self.device, *self.call, *self.wrong}

    @property
    def ratios(self) -> Mapping[str, float]:
        return self.device or self.call

    @property
    def lost(self) -> set[str]:
        """Names of all comparisons that are lost by either clock, or incorrect."""
        slower = {name for by in (self.device, self.call) for name, ratio in by.items() if ratio < 1}
        return slower | {*self.wrong}

    @property
    def mean(self) -> str:
        return cells.times(statistics.geometric_mean(self.ratios.values())) if self.ratios else ""

    @property
    def worst(self) -> tuple[str, str]:
        """Return the smallest ratio and its name; a failure is worse."""
        if self.wrong:
            return "failed", self.wrong[0]
        name = min(self.ratios, key=lambda name: self.ratios[name])
        return cells.times(self.ratios[name]), name

    @property
    def row(self) -> tuple[object, ...]:
        on_device, per_call = (sum(ratio < 1 for ratio in by.values()) for by in (self.device, self.call))
        won = len(self.names), len(self.names - self.lost)
        lost = on_device, per_call if self.call else "", len(self.wrong)
        return self.title, *won, *lost, self.mean, *self.worst, self.records


_HEADS = (
    "set|>compared|>faster|>slower on the device|>slower per call|>not right|>vs best peer, geometric mean|>worst|"
    "of"
)


def summary(found: Sequence[Verdict], title: str = "", level: int = 4) -> Iterator[str | Table]:
    """Yield a sentence on all comparisons, and a row for each set: counts, the geometric mean and the worst."""
    if found:
        lost, every = sum(len(v.lost) for v in found), sum(len(v.names) for v in found)
        wrong = sum(len(v.wrong) for v in found)
        yield (
            f"**{every - lost} of {every} comparisons with the best peer are won, and {lost} are lost**: slower on the "
            f"device or per call by the wall clock, or not right ({wrong})."
        )
    yield Table.of(_HEADS, (v.row for v in found), title, level=level)
