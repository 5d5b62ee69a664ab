"""Formats single figures, and the columns of a record's own figures. What was not measured is an empty cell."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import Clock
from escalade_bench.peers.registry import TITLES

OLDER = "older code"
"""Follows the commit and the day of a figure that is no longer current."""
THROTTLED = "ᵗ"
"""Follows a time that was taken while the card held its clock down."""
_REASON = 40
"""Characters of a failure that fit into a cell; the record has all of it."""


def who(record: Record) -> str:
    return record.rung or record.system


def peer(record: Record | None) -> str:
    return TITLES.get(record.system, record.system) if record else ""


def microseconds(record: Record | None) -> str:
    return figure(record.median_us) + (THROTTLED if record.throttled else "") if record else ""


def figure(value: float | None) -> str:
    """Four digits or so, whatever the size."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def milliseconds(us: float | None) -> str:
    return "" if us is None else f"{us / 1000:.4f}" if us < 1000 else figure(us / 1000)


def written(form: str, value: Any) -> str:
    """The value in a form like `{:,.0f}`; nothing for None."""
    return "" if value is None else form.format(value)


whole, share, error = (partial(written, form) for form in ("{:,.0f}", "{:.0%}", "{:.1e}"))


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×" if value < 100 else f"{value:,.0f}×"


def quotient(above: float | None, below: float | None) -> str:
    return times(above / below) if above and below else ""


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"


def gflops(record: Record) -> str:
    return "" if record.tflops is None else whole(1000 * record.tflops)


def over_floor(record: Record) -> str:
    return f"{record.median_us / record.floor_us:.2f}" if record.median_us and record.floor_us else ""


def spread(record: Record) -> str:
    low, high = record.p20_us, record.p80_us
    return "" if low is None or high is None else f"{low:.4g}–{high:.4g}"


def config(record: Record) -> str:
    """Switches by name where they are on, numbers by name and value; why a record failed instead."""
    if record.failure:
        return f"{'refused' if record.is_peer else 'failed'}: {first_line(record.failure)}"
    kept = ((name, value) for name, value in record.config.items() if value is not False)
    return " ".join(name if value is True else f"{name}={value}" for name, value in kept)


def first_line(failure: str) -> str:
    return failure.splitlines()[0] if failure else ""


def reason(record: Record) -> str:
    """Why a record has no time, in a few words."""
    return textwrap.shorten(first_line(record.failure), _REASON, placeholder=" …")


def time_or_reason(record: Record | None, clock: Clock) -> str:
    """The time by one clock, or why there is none; nothing if it was not tried."""
    return figure(clock(record)) or reason(record) if record else ""


def stamp(records: Iterable[Record]) -> str:
    """The commit and day of our records behind a row (of the peers' if it has none of ours), marked if older."""
    found = list(records)
    own = sorted((r for r in found if not r.is_peer), key=lambda r: r.date) or found
    stamps = list(dict.fromkeys(f"{r.commit[:8]} {r.date[5:10]}".strip() for r in own))
    shown = ", ".join(stamps[-2:]) + (f" and {len(stamps) - 2} more" if len(stamps) > 2 else "")
    return shown + (f" {OLDER}" if any(r.older for r in found) else "")


TEXTS: dict[str, Callable[[Record], str]] = {
    "workload": lambda r: r.workload,
    "problem": lambda r: r.problem,
    "dtype": lambda r: r.dtype,
    "layout": lambda r: r.layout,
    "rung": who,
    "best peer": peer,
    "note": lambda r: r.note or first_line(r.failure),
    "over": lambda r: r.gain_over,
    "config": config,
    "result": lambda r: f"failed: {first_line(r.failure)}" if r.failure else "right",
}
"""Cells of a record that are text, by heading."""
FIGURES: dict[str, Callable[[Record], str]] = {
    "batch": lambda r: f"{r.batch:,}",
    "µs": microseconds,
    "µs per call": lambda r: figure(r.wall_us),
    "images/s": lambda r: whole(r.images_per_s),
    "TFLOP/s": lambda r: written("{:,.1f}", r.tflops),
    "GFLOP/s": gflops,
    "GB/s": lambda r: whole(r.gbps),
    "% of ceiling": lambda r: written("{:.1f}", r.peak_pct),
    "% of a copy": lambda r: written("{:.1f}", r.copy_pct),
    "× floor": over_floor,
    "floor, µs": lambda r: figure(r.floor_us),
    "p20–p80": spread,
    "gain": lambda r: times(r.gain),
    "predicted": lambda r: times(r.predicted_gain),
    "error": lambda r: error(r.error),
    "allowed": lambda r: error(r.tolerance),
    "registers": lambda r: (
        written("{}", r.registers) + (f" ({r.spill_bytes} B spilled)" if r.spill_bytes else "")
    ),
    "occupancy": lambda r: share(r.occupancy),
    "MiB": lambda r: mebibytes(r.peak_bytes),
}
"""Cells of a record that are figures, by heading."""
