"""Pairs around a training step in docs/training-steps.md, from the records in results/."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.networks.step_pairs import GROUPS, SUFFIX
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.ablation_pages import measured, nothing
from escalade.report.markdown import origin, table

PART = "training-pairs"
"""The generated part of the page, by the markers around it, and the part of `escalade bench` that measures it."""


def block(records: Sequence[Record]) -> str:
    """A table for each network, batch and dtype whose pairs were measured; without any it says so."""
    return "".join(map(_section, measured(records, SUFFIX))) or nothing(PART)


def _section(records: Sequence[Record]) -> str:
    first = records[0]
    found = {record.rung: record for record in records}
    rows = [
        (title, name, *_cells(found.get(name), found.get(variants[0])))
        for title, variants in GROUPS.items()
        for name in variants
    ]
    return (
        f"{first.workload.removesuffix(SUFFIX)}, batch {first.batch}, {first.dtype}, on an {first.gpu}. "
        f"{origin(records)}\n" + table(("what", "how", "µs", "faster than the first"), rows, left=2)
    )


def _cells(record: Record | None, first: Record | None) -> tuple[str, str]:
    """The time of a variant, or why there is none, and how many times as fast as the first it is."""
    if record is None:
        return "", ""
    if record.median_us is None or first is None or first.median_us is None:
        return cells.microseconds(record) or cells.reason(record), ""
    return cells.microseconds(record), cells.times(first.median_us / record.median_us)
