"""The last run of the tests on a GPU, for docs/measuring.md."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.store import Record
from escalade.report.markdown import table

WORKLOAD = "gpu_test"
PART = "gpu-test"
"""Of the page, by the markers around it."""


def block(records: Sequence[Record]) -> str:
    """A row for the tests and each tool; a sentence until there is a record."""
    own = [record for record in records if record.workload == WORKLOAD]
    if not own:
        return "No run is recorded yet.\n"
    header = ("part", "program", "passed", "failed", "skipped", "seconds", "result")
    rows = [
        (
            r.problem, r.system, *(str(r.config.get(name, "")) for name in ("passed", "failed", "skipped", "seconds")),
            f"failed: {r.failure.splitlines()[0]}" if r.failure else "right",
        )
        for r in own
    ]  # fmt: skip
    last = max(own, key=lambda record: record.date)
    parts = [
        f"{last.gpu}, driver {last.driver}, commit {last.commit}, {last.date[:10]}:\n\n",
        table(header, rows, left=2),
    ]
    reasons: dict[str, int] = {}
    for record in own:
        reasons.update(record.config.get("reasons", {}))
    if reasons:
        parts.append("\nSkipped, with how many tests:\n\n")
        parts += [f"- {reason}: {count}\n" for reason, count in sorted(reasons.items())]
    return "".join(parts)
