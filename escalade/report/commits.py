"""Figures that stand beside each other belong together: which records mix what does not, and which are the newest.

What was measured in turns is of one commit. Tables of several comparisons may hold those of other commits too, where
the records say what they were made of (`escalade.measure.sources`) and that is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.measure.records import Record
from escalade.measure.sources import DECLARED, agree, same_versions

APART = ("ceilings", "gpu_test", "campaign")
"""Workloads whose records are not compared with each other."""


def newest(records: Sequence[Record]) -> list[Record]:
    """What a table, or all tables of a network, show: the comparison that was measured last, and those that agree with
    it, and with what is shown already, in what they were made of. Where that is not known, its commit decides."""
    if not records:
        return []
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault(record.comparison, []).append(record)
    last, *others = sorted(map(_last_commit, groups.values()), key=_date, reverse=True)
    commit, versions, known = last[0].commit, last[0].versions, _made_of(last)
    shown = list(last)
    for group in others:
        made_of = _made_of(group)
        if not known or not made_of:
            shown += [record for record in group if record.commit == commit]
        elif agree(made_of, known) and same_versions(group[0].versions, versions):
            shown += group
            known |= made_of
    kept = set(map(id, shown))
    return [record for record in records if id(record) in kept]


def _last_commit(group: Sequence[Record]) -> list[Record]:
    """The records of one comparison that are of the commit that was measured last."""
    commit = max(group, key=lambda record: record.date).commit
    return [record for record in group if record.commit == commit]


def _date(group: Sequence[Record]) -> str:
    return max(record.date for record in group)


def _made_of(group: Sequence[Record]) -> dict[str, str]:
    return {name: known for record in group for name, known in record.sources.items() if name != DECLARED}


def commits_of(records: Iterable[Record]) -> str:
    """All commits of what is shown together."""
    return ", ".join(sorted({record.commit for record in records}))


def told(rows: Sequence[Sequence[Record]]) -> list[str]:
    """The commit of each row of a table, where they are of several; nothing where all are of one."""
    each = [commits_of(records) for records in rows]
    return each if len(set(filter(None, each))) > 1 else [""] * len(each)


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
