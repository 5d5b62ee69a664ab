"""A convolution's climb with the bytes that it really moved: where the wall is."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.campaign.ladders import FEATURED as PROBLEM
from escalade.bench.campaign.ladders import TRAFFIC as RUNGS
from escalade.measure.records import Record
from escalade.profile.climb import SUFFIX
from escalade.report import cells
from escalade.report.commits import newest
from escalade.report.markdown import origin, table
from escalade.report.plans.section import Section

_OPERANDS, _OPERATIONS = 8, 2
"""Bytes of both operands of a multiply-add in fp32, and the operations that it counts as."""
_HEADER = (
    "dtype", "rung", "GFLOP/s", "% of ceiling", "fewest MB", "MB moved", "times the fewest", "GB/s of memory",
    "% of its peak", "GB/s of L2", "what it does",
)  # fmt: skip
_ABOUT = """The plan begins with a wall: a naive convolution reads its operands from memory, memory has so many bytes a
second, so that is the most it can do, and every step after it is to read less. The bytes here are counted by Nsight
Compute, caches empty before each kernel; *% of ceiling* is of a matrix product of the same dtype."""


def _block(records: Sequence[Record]) -> str:
    own = newest([r for r in records if r.workload == "conv2d" + SUFFIX and r.problem == PROBLEM])
    if not own:
        return ""
    known = {(r.dtype, r.rung): r for r in own}
    shown = [known[dtype, rung] for dtype, rungs in RUNGS.items() for rung in rungs if (dtype, rung) in known]
    text = f"{origin(own)}\n{_wall(records, shown)}{table(_HEADER, map(_row, shown), left=2)}"
    return text


def _row(record: Record) -> tuple[str, ...]:
    said, us = record.config, record.time
    fewest, moved, l2 = (said[name] for name in ("fewest_bytes", "moved_bytes", "l2_bytes"))
    return (
        record.dtype, f"`{record.rung}`", cells.gflops(record), cells.percent(record.peak_pct),
        cells.whole(fewest / 1e6), cells.whole(None if moved is None else moved / 1e6),
        cells.times(None if moved is None else moved / fewest),
        cells.whole(None if moved is None else moved / us / 1e3), cells.percent(said["dram_pct"]),
        cells.whole(None if l2 is None else l2 / us / 1e3), record.note,
    )  # fmt: skip


def _wall(records: Sequence[Record], shown: Sequence[Record]) -> str:
    """What memory would allow the naive rung without caches, and what caches have made of it."""
    naive = shown[0]
    moved = naive.config["moved_bytes"]
    copies = [r.gbps for r in records if r.workload == "ceilings" and r.problem.startswith("copy") and r.gbps]
    if not copies or moved is None or naive.tflops is None:
        return ""
    asked = naive.tflops * 1e6 * naive.time / _OPERATIONS * _OPERANDS
    return (
        f"Without caches `{naive.rung}` would move {asked / 1e9:,.0f} GB, {_OPERANDS} bytes for each multiply-add, and "
        f"at the rate of a copy ({copies[0]:,.0f} GB/s) stand before a wall of "
        f"{copies[0] / _OPERANDS * _OPERATIONS:,.0f} GFLOP/s. It moves {moved / 1e9:,.2f} GB and does "
        f"{cells.gflops(naive)}: caches serve {100 * (1 - moved / asked):.1f}% of what it asks for. Its wall is not "
        "memory's but that of the requests themselves, and what gets it over is fewer of them for each multiply-add: "
        "registers that are used again.\n\n"
    )


SECTION = Section(
    "A convolution and the wall of memory",
    _ABOUT,
    "escalade measure traffic/conv2d",
    _block,
)
