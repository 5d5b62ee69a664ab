"""What a call of an operator costs the CPU, in docs/measuring.md, from the records in results/."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.calls.measurement import FORWARD, WITH_GRADIENT
from escalade.measure.records import Record
from escalade.report.calls import HEADER, TEXTS, rows
from escalade.report.commits import newest
from escalade.report.markdown import origin, table

PART = "calls"
"""The generated part of the page, by the markers around it."""


def block(records: Sequence[Record]) -> str:
    """What was measured last, of one commit or of the same kernels; without any it says so."""
    shown = newest([record for record in records if record.workload in (FORWARD, WITH_GRADIENT)])
    if not shown:
        return (
            "It has not been measured yet. On a machine with a GPU: `escalade calls --results results`, then "
            "`escalade tables`.\n"
        )
    return f"On an {shown[0].gpu}. {origin(shown)}\n" + table(HEADER, rows(shown), left=len(TEXTS))
