"""Where every figure comes from, and how near to right it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.markdown import table


def provenance(records: Iterable[Record]) -> str:
    """A row for all figures of a workload that were made together, with the command that repeats them."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        versions = ", ".join(f"{name} {value}" for name, value in r.versions.items())
        groups.setdefault((r.workload, r.gpu, r.driver, versions, r.commit, r.command), []).append(r)
    rows = [
        (workload, gpu, driver, versions, commit, f"`{command}`", _days(own), f"{len(own):,}")
        for (workload, gpu, driver, versions, commit, command), own in groups.items()
    ]
    header = (
        "workload", "card", "driver", "versions", "commit", "repeated by", "measured on", "figures",
    )  # fmt: skip
    return table(header, rows, left=len(header) - 1)


def _days(records: Sequence[Record]) -> str:
    days = sorted(record.date[:10] for record in records)
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def accuracy(records: Iterable[Record]) -> str:
    """A row for each workload and dtype: the result of ours that is nearest to what is allowed."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if not record.is_peer and (record.failure or record.error is not None):
            groups.setdefault((record.workload, record.dtype), []).append(record)
    rows = []
    for (workload, dtype), own in groups.items():
        worst = max(own, key=_of_allowed)
        known = [r for r in own if r.accuracy is not None]
        labelled = max(known, key=lambda record: record.batch, default=None)
        right = f"{labelled.accuracy:.4f} of {labelled.batch:,}" if labelled else ""
        rows.append(
            (workload, dtype, f"`{worst.problem}`", f"{len(own):,}", str(sum(bool(r.failure) for r in own)),
             cells.error(worst.error), cells.error(worst.tolerance), cells.share(_of_allowed(worst) or None), right)
        )  # fmt: skip
    header = (
        "workload", "dtype", "nearest to its limit", "verified", "failed", "its error", "allowed", "of allowed",
        "right of labelled images",
    )  # fmt: skip
    return table(header, rows, left=3)


def _of_allowed(record: Record) -> float:
    return record.error / record.tolerance if record.error is not None and record.tolerance else 0.0
