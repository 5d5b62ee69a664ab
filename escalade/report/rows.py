"""Networks over rows of numbers, whose batches reach from a few to a million."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.measure.records import Record


def of_rows(records: Sequence[Record]) -> bool:
    return any(record.layout == "flat" for record in records)
