"""What a billion images would take of GPUs, in docs/many-machines.md, from what one was measured at."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.measure.records import Record
from escalade.report.markdown import origin, table
from escalade.report.network_pages import README_NETWORK, of_network

PAGE = "many-machines.md"
PART = "billion"
"""The generated part of the page, by the markers around it."""
IMAGES = 10**9
_HOUR_US = 3600e6


def block(records: Sequence[Record]) -> str:
    """Hours of a GPU for so many images, for each batch and dtype that the network was measured at."""
    own = [
        record
        for record in of_network(records, README_NETWORK)
        if record.workload == README_NETWORK and record.system == "escalade" and record.median_us
    ]
    if not own:
        return f"Nothing is measured yet: `escalade bench {README_NETWORK}`.\n"
    header = ("dtype", "batch", "µs on the device", "GPU hours", "µs a call", "GPU hours by calls")
    rows = [
        (record.dtype, str(record.batch), *_hours(record.median_us, record), *_hours(record.wall_us, record))
        for record in own
    ]
    return f"{README_NETWORK}, {IMAGES:,} images, on an {own[0].gpu}. {origin(own)}\n" + table(
        header, rows, left=2
    )


def _hours(microseconds: float | None, record: Record) -> tuple[str, str]:
    """The time of a batch, and that of all images, one batch after the other."""
    if microseconds is None:
        return "", ""
    return f"{microseconds:,.1f}", f"{IMAGES / record.batch * microseconds / _HOUR_US:,.2f}"
