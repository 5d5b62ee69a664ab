"""Commits of the records that a table shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record

APART = ("ceilings", "gpu_test", "campaign")
"""Workloads whose records are not compared with each other."""


def newest(records: Sequence[Record]) -> list[Record]:
    """Return all records: no figure is hidden because another one is newer."""
    return list(records)


def commits_of(records: Iterable[Record]) -> str:
    """All commits of what is shown together."""
    return ", ".join(sorted({record.commit for record in records}))


def told(rows: Sequence[Sequence[Record]]) -> list[str]:
    """The commit of each row of a table, where they are of several; nothing where all are of one."""
    each = [commits_of(records) for records in rows]
    return each if len(set(filter(None, each))) > 1 else [""] * len(each)
