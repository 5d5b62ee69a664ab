"""Figures that stand beside each other are of one commit: which records mix several, and which are the newest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record

APART = ("ceilings", "gpu_test")
"""Workloads whose records are not compared with each other."""


def newest(records: Sequence[Record]) -> list[Record]:
    """The records of the commit that was measured last: what a table, or all tables of a network, show."""
    if not records:
        return []
    commit = max(records, key=lambda record: record.date).commit
    return [record for record in records if record.commit == commit]


def mixed(records: Iterable[Record]) -> list[str]:
    """A sentence for each problem and dtype whose records, ours and peers', are of several commits."""
    groups: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for record in records:
        if record.workload not in APART:
            commits = groups.setdefault(record.comparison, {})
            commits.setdefault(record.commit, []).append(record.rung or record.system)
    return [
        f"{' '.join(comparison)} mixes commits: "
        + "; ".join(f"{commit} ({_few(names)})" for commit, names in sorted(commits.items()))
        for comparison, commits in groups.items()
        if len(commits) > 1
    ]


def _few(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")
