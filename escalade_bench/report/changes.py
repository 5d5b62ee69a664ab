"""Figures that got slower or faster than in older records, beyond the spread of both."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade_bench.measure.records import Record, gpu_folder, load, load_folder
from escalade_bench.report import cells
from escalade_bench.report.compare import grouped
from escalade_bench.report.document import Item
from escalade_bench.report.table import Column, Table, columns, text

Records = Mapping[str, Sequence[Record]]
"""Records by GPU folder."""
Change = tuple[Record, Record]
"""An old and a new record with the same key, timed in the same way on the same model of card."""


def speedup(change: Change) -> float:
    return change[0].time / change[1].time


COLUMNS = [
    *columns("workload|problem|dtype|layout|who=rung", lambda change: change[1]),
    *columns("before, µs=µs|p20–p80 before=p20–p80", lambda change: change[0]),
    *columns("now, µs=µs|p20–p80 now=p20–p80", lambda change: change[1]),
    Column("times as fast", lambda change: cells.times(speedup(change))),
    text("commits", lambda change: f"{change[0].commit} to {change[1].commit}"),
]


@dataclass(frozen=True)
class Changes:
    """Keys timed in both, and the number of keys in only one."""

    same: tuple[Change, ...]
    only_old: int
    only_new: int

    @property
    def slower(self) -> list[Change]:
        """Return changes where the new p20 is above the old p80."""
        return sorted((c for c in self.same if (c[1].p20_us or 0) > (c[0].p80_us or c[0].time)), key=speedup)

    @property
    def faster(self) -> list[Change]:
        return sorted((c for c in self.same if (c[1].p80_us or c[1].time) < (c[0].p20_us or 0)), key=speedup)[
            ::-1
        ]

    @property
    def sentence(self) -> str:
        return (
            f"Of {len(self.same):,} times that both have, {len(self.slower):,} got slower and {len(self.faster):,} "
            f"faster beyond the spread (p20 to p80 of both do not meet); {self.only_new:,} are only here, "
            f"{self.only_old:,} only there."
        )

    def items(self) -> Iterator[Item]:
        yield self.sentence
        for title, some in (("Slower", self.slower), ("Faster", self.faster)):
            if some:
                yield Table(COLUMNS, some, lambda change: (change[1],), title, level=3)


def read_old(path: pathlib.Path) -> Records:
    """Return the records of a results folder or of one file in it."""
    records = grouped(load(path), lambda r: gpu_folder(r.gpu)) if path.is_file() else load_folder(path)
    if not records:
        raise UnsupportedError(
            f"there are no records in {path}; --against takes a folder like results/, with one folder per GPU in it, "
            "or one .jsonl file of records"
        )
    return records


def between(old: Records, new: Records) -> Changes:
    before, now = (
        {(gpu, r.timing, *r.key): r for gpu, own in some.items() for r in own if r.median_us is not None}
        for some in (old, new)
    )
    same = tuple((before[key], now[key]) for key in now if key in before)
    return Changes(same, len(before) - len(same), len(now) - len(same))
