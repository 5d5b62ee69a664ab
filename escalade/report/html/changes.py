"""What got slower or faster since older records, beyond the spread of both."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.measure.records import Record, gpu_folder, load, load_folder
from escalade.report import cells
from escalade.report.markdown import table

Records = Mapping[str, Sequence[Record]]
"""Records by GPU folder."""
_HEADER = (
    "workload", "problem", "dtype", "layout", "who", "before, µs", "p20–p80 before", "now, µs", "p20–p80 now",
    "times as fast", "commits",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One thing, measured twice."""

    old: Record
    new: Record

    @property
    def speedup(self) -> float:
        return self.old.time / self.new.time

    @property
    def has_spread(self) -> bool:
        """Whether it is known of either how far its samples lie apart; else nobody can say what is beyond that."""
        return any(record.p20_us is not None for record in (self.old, self.new))

    @property
    def is_slower(self) -> bool:
        """Four fifths of the new samples take longer than four fifths of the old ones."""
        return self.has_spread and spread(self.new)[0] > spread(self.old)[1]

    @property
    def is_faster(self) -> bool:
        return self.has_spread and spread(self.new)[1] < spread(self.old)[0]


@dataclass(frozen=True)
class Changes:
    """Everything that both have a time of, taken in the same way, and how much only one has."""

    same: tuple[Change, ...]
    only_old: int
    only_new: int

    @property
    def slower(self) -> list[Change]:
        """The worst first."""
        return sorted((c for c in self.same if c.is_slower), key=lambda change: change.speedup)

    @property
    def faster(self) -> list[Change]:
        """The best first."""
        return sorted((c for c in self.same if c.is_faster), key=lambda change: -change.speedup)

    @property
    def sentence(self) -> str:
        unknown = sum(not change.has_spread for change in self.same)
        left_out = f"; of {unknown:,} the spread is not known" if unknown else ""
        return (
            f"Of {len(self.same):,} times that both have, {_ours(self.slower)} got slower and {_ours(self.faster)} "
            f"faster beyond the spread (p20 to p80 of both do not meet){left_out}; {self.only_new:,} are only here, "
            f"{self.only_old:,} only there."
        )


def _ours(some: Sequence[Change]) -> str:
    peers = sum(change.new.is_peer for change in some)
    return f"{len(some):,} ({peers:,} of them peers')" if peers else f"{len(some):,}"


def spread(record: Record) -> tuple[float, float]:
    """From the 20th to the 80th percentile; of a time without them, the time itself."""
    low, high = record.p20_us, record.p80_us
    return record.time if low is None else low, record.time if high is None else high


def read_old(path: pathlib.Path) -> Records:
    """The records of a results folder, or of one file of them."""
    if path.is_file():
        found: dict[str, list[Record]] = {}
        for record in load(path):
            found.setdefault(gpu_folder(record.gpu), []).append(record)
        return found
    records = load_folder(path)
    if not records:
        raise UnsupportedError(
            f"there are no records in {path}; --against takes a folder like results/, with a folder a GPU in it, or "
            "one .jsonl file of records"
        )
    return records


def between(old: Records, new: Records) -> Changes:
    """Everything that was timed in both, on GPUs of the same kind."""
    before, now = _timed(old), _timed(new)
    same = tuple(Change(before[key], now[key]) for key in now if key in before)
    return Changes(same, len(before) - len(same), len(now) - len(same))


def _timed(records: Records) -> dict[tuple[str, ...], Record]:
    return {
        (gpu, record.timing, *record.key): record
        for gpu, own in records.items()
        for record in own
        if record.median_us is not None
    }


def text(found: Changes) -> str:
    """A table of what got slower and one of what got faster, as Markdown."""
    made = [found.sentence + "\n"]
    for title, some in (("Slower", found.slower), ("Faster", found.faster)):
        if some:
            made.append(f"\n### {title}\n\n{_table(some)}")
    return "".join(made)


def _table(some: Iterable[Change]) -> str:
    rows = [
        (
            c.new.workload, f"`{c.new.problem}`", c.new.dtype, c.new.layout, cells.who(c.new),
            cells.microseconds(c.old), _spread(c.old), cells.microseconds(c.new), _spread(c.new),
            cells.times(c.speedup), f"{c.old.commit} to {c.new.commit}",
        )
        for c in some
    ]  # fmt: skip
    return table(_HEADER, rows, left=5)


def _spread(record: Record) -> str:
    low, high = spread(record)
    return f"{low:.4g}–{high:.4g}"
