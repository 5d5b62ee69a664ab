"""What Nsight Compute prints, as numbers: one row a kernel, one column a metric, a row of units in between."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from escalade.errors import EscaladeError

_SCALES = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
"""Bytes of a unit, or nanoseconds; what is neither is a count, a ratio or a percentage, and stays."""
_FIRST_COLUMN = "ID"


@dataclass(frozen=True)
class Reading:
    """One kernel's metrics by name: bytes, nanoseconds, percentages and counts."""

    kernel: str
    grid: str
    block: str
    values: dict[str, float]


def parse(text: str) -> list[Reading]:
    """The readings of `ncu --csv --page raw`, in the order of the launches. What is no number is left out."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith(f'"{_FIRST_COLUMN}",')), None)
    if start is None:
        raise EscaladeError("ncu wrote no table of metrics")
    table = [row for row in csv.reader(lines[start:]) if len(row) > 1]  # others are what ncu says between
    header, *rows = table
    units = dict(zip(header, rows.pop(0), strict=False)) if rows and not rows[0][0] else {}
    readings = []
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        values = {
            name: number * _scale(units.get(name, ""))
            for name, cell in cells.items()
            if "__" in name and (number := _number(cell)) is not None
        }
        readings.append(
            Reading(cells["Kernel Name"], cells.get("Grid Size", ""), cells.get("Block Size", ""), values)
        )
    return readings


def _scale(unit: str) -> float:
    return _SCALES.get(unit.split("/")[0], 1.0)


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
