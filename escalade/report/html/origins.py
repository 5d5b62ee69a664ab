"""Where every figure comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record
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
