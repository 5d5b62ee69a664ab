"""The last run of the tests on a GPU, for docs/measuring.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from escalade.measure.records import Record
from escalade.report.markdown import table

WORKLOAD = "gpu_test"
PART = "gpu-test"
"""The part of the page, by the markers around it."""
COUNTS = ("passed", "failed", "skipped", "seconds")
MOST_LETTERS = 160
"""Letters of what a failure says; the record has the rest."""


def block(records: Sequence[Record]) -> str:
    """A row for the tests and each tool, as each last ran; a sentence until there is a record."""
    own = [record for record in records if record.workload == WORKLOAD]
    if not own:
        return "No run is recorded yet.\n"
    header = ("part", "program", "commit", *COUNTS, "result")
    rows = [
        (
            r.problem, r.system, r.commit, *(str(r.config.get(name, "")) for name in COUNTS),
            f"failed: {textwrap.shorten(r.failure, MOST_LETTERS, placeholder=' …')}" if r.failure else "right",
        )
        for r in own
    ]  # fmt: skip
    last = max(own, key=lambda record: record.date)
    parts = [
        f"{last.gpu}, driver {last.driver}, {last.date[:10]}:\n\n",
        table(header, rows, left=3),
    ]
    reasons: dict[str, int] = {}
    for record in own:
        reasons.update(record.config.get("reasons", {}))
    if reasons:
        parts.append("\nSkipped, with how many tests:\n\n")
        parts += [f"- {reason}: {count}\n" for reason, count in sorted(reasons.items())]
    return "".join(parts)
