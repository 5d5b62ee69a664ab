"""The host's time for calls of operators beside PyTorch's, as rows and as a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from escalade.bench.calls.measurement import FORWARD, WITH_GRADIENT
from escalade.fitted import Table
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.commits import told

TEXTS = ("call", "dtype", "layout")
"""The headings above text; above the others are figures."""
HEADER = (
    *TEXTS,
    *(f"{what}{kind}" for kind in ("", " with gradients") for what in ("µs", "PyTorch's", "ratio")),
    "commit",
)


def rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """A row for each call, dtype and layout, with both workloads beside each other."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.problem, record.dtype, record.layout), []).append(record)
    for (what, own), commit in zip(found.items(), told(list(found.values())), strict=True):
        figures = []
        for workload in (FORWARD, WITH_GRADIENT):
            by_system = {record.system: record for record in own if record.workload == workload}
            ours, theirs = by_system.get("escalade"), by_system.get("torch")
            figures += [_time(ours), _time(theirs), _ratio(ours, theirs)]
        yield *what, *figures, commit


def _time(record: Record | None) -> str:
    return "" if record is None else cells.figure(record.median_us) or cells.reason(record)


def _ratio(ours: Record | None, theirs: Record | None) -> str:
    """How many times as long PyTorch's call takes."""
    if ours is None or theirs is None or not ours.median_us or not theirs.median_us:
        return ""
    return cells.times(theirs.median_us / ours.median_us)


def table(records: Sequence[Record]) -> Table:
    made = Table(title="The host's time for a call", title_justify="left")
    for heading in HEADER:
        made.add_column(heading, justify="left" if heading in TEXTS else "right")
    for row in rows(records):
        made.add_row(*row)
    return made
