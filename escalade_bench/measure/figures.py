"""Figures from times: rates, shares of the ceilings, gains. Pure functions over records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from escalade.device.timing import Timing
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.problem import Problem
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record


def with_times(record: Record, timing: Timing) -> Record:
    """Return the record with its times, and the card's state meanwhile."""
    return replace(
        record,
        timing=timing.how,
        samples=timing.samples,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        conditions=timing.record,
    )


def timed(record: Record, problem: Problem, timing: Timing, ceilings: Ceilings | None) -> Record:
    """Return the record with its times; with rates only where they were measured on a GPU."""
    record = replace(with_times(record, timing), note="; ".join(filter(None, (record.note, timing.note))))
    if timing.how == "twin" or timing.median_us <= 0:
        return record
    record = replace(
        record, tflops=problem.flops / timing.median_us / 1e6, gbps=problem.bytes / timing.median_us / 1e3
    )
    if ceilings is None:
        return record
    return replace(
        record,
        floor_us=ceilings.floor_us(problem.flops, problem.bytes, problem.dtype),
        peak_pct=100 * (record.tflops or 0.0) / ceilings.peak(problem.dtype),
    )


def fastest(records: Iterable[Record]) -> Record | None:
    """Return the record with the shortest time; None if none has a time."""
    timed = [record for record in records if record.median_us is not None]
    return min(timed, key=lambda record: record.time, default=None)


def below(record: Record, records: Sequence[Record], ladder: Ladder[Any]) -> Record | None:
    """Return the nearest rung below that was timed: in the same dtype and layout, else dtype, else in any.

    A rung without a record is replaced by the rungs that it builds on.
    """
    rungs_below = {rung.name: rung.rungs_below for rung in ladder}
    names, any_dtype = rungs_below.get(record.rung, ()), None
    while names:
        found = [r for r in records if r.rung in names]
        same = [r for r in found if r.dtype == record.dtype]
        any_dtype = any_dtype or fastest(found)
        if same:
            return fastest(r for r in same if r.layout == record.layout) or fastest(same)
        names = tuple(dict.fromkeys(below for name in names for below in rungs_below[name]))
    return any_dtype


def with_gains(records: Sequence[Record], ladder: Ladder[Any]) -> list[Record]:
    """Return one problem's records with their gains over the rung below, and over the best peer of the same dtype."""
    speeds = [record for record in records if record.median_us is not None and record.timing != "twin"]
    ours = [record for record in speeds if not record.is_peer]
    found = []
    for record in records:
        base = below(record, ours, ladder) if record in ours else None
        peer = fastest(r for r in speeds if r.is_peer and r.dtype == record.dtype) if record in ours else None
        if base:
            over = f"{base.rung} {base.dtype} {base.layout}"
            record = replace(record, gain=base.time / record.time, gain_over=over)
        if peer:
            record = replace(record, peer_gain=peer.time / record.time, peer=peer.system)
        found.append(record)
    return found
