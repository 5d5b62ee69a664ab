"""One figure each, as the tables spell it. What was not measured is an empty cell."""

from __future__ import annotations

import textwrap

from escalade.bench.peers.comparison import Against, Clock
from escalade.measure.records import Record


def who(record: Record) -> str:
    return record.rung or record.system


THROTTLED = "ᵗ"
"""Behind a time that was taken while the card held its clock down."""


def microseconds(record: Record) -> str:
    return figure(record.median_us) + (THROTTLED if record.throttled else "")


def figure(value: float | None) -> str:
    """Four digits or so, whatever the size."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def gflops(record: Record) -> str:
    return whole(None if record.tflops is None else record.tflops * 1000)


def whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def over_floor(record: Record) -> str:
    if record.median_us is None or not record.floor_us:
        return ""
    return f"{record.median_us / record.floor_us:.2f}"


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def integer(value: int | None) -> str:
    return "" if value is None else str(value)


def config(record: Record) -> str:
    """Switches by name where they are on, numbers by name and value."""
    parts = []
    for name, value in record.config.items():
        if value is True:
            parts.append(name)
        elif value is not False:
            parts.append(f"{name}={value}")
    return " ".join(parts)


_REASON = 40
"""Letters of a reason that a cell has room for; the record has the rest."""


def reason(record: Record) -> str:
    """Why a record has no time, in a few words."""
    return (
        textwrap.shorten(record.failure.splitlines()[0], _REASON, placeholder=" …") if record.failure else ""
    )


def time_or_reason(record: Record | None, clock: Clock) -> str:
    """The time by one clock, or why there is none; nothing if it was not tried."""
    if record is None:
        return ""
    return figure(clock(record)) or reason(record)


def against(found: Against) -> str:
    """The ratio over the best peer, or what is missing for it."""
    return times(found.ratio) or found.why
