"""Where every figure comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from escalade.bench.campaign.staleness import WORKLOAD as CAMPAIGN
from escalade.measure.records import Record
from escalade.report.markdown import table


def provenance(records: Iterable[Record]) -> str:
    """The machines by number; then a row for all figures of a workload that were made together, with the command that
    repeats them."""
    machines: dict[tuple[str, str, str], int] = {}
    groups: dict[tuple[str, str, str, int], list[Record]] = {}
    for r in records:
        if r.workload == CAMPAIGN:  # what was done when, and no figure
            continue
        versions = ", ".join(f"{name} {value}" for name, value in r.versions.items())
        machine = machines.setdefault((r.gpu, r.driver, versions), len(machines) + 1)
        groups.setdefault((r.workload, r.command, r.commit, machine), []).append(r)
    known = [(str(number), *machine) for machine, number in machines.items()]
    rows = [
        (workload, f"`{command}`", commit, _days(own), str(machine), f"{len(own):,}")
        for (workload, command, commit, machine), own in groups.items()
    ]
    return (
        table(("machine", "card", "driver", "versions"), known, left=4)
        + "\n"
        + table(("workload", "repeated by", "commit", "measured on", "machine", "figures"), rows, left=4)
    )


def _days(records: Sequence[Record]) -> str:
    days = sorted(record.date[:10] for record in records)
    return " to ".join(dict.fromkeys((days[0], days[-1])))
