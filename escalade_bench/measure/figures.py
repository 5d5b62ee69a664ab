"""Makes figures of times: rates, shares of the ceilings, gains. Pure functions over records."""

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
    """The record with its times, and the card's state meanwhile."""
    return replace(
        record,
        timing=timing.how,
        samples=timing.samples,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        conditions=timing.seen,
    )


def timed(record: Record, problem: Problem, timing: Timing, ceilings: Ceilings | None) -> Record:
    """The record with its times; with rates only where they were measured on a GPU."""
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
        peak_pct=100 * (record.tflops or 0.0) / ceilings.tflops[problem.dtype],
    )


def with_gains(records: Sequence[Record], ladder: Ladder[Any]) -> list[Record]:
    """The gains of one problem's records: over the rung below, and over the best peer of the same dtype."""
    return [_with_peer_gain(_with_gain(record, records, ladder), records) for record in records]


def _is_speed(record: Record) -> bool:
    return record.median_us is not None and record.timing != "twin"


def _with_gain(record: Record, records: Sequence[Record], ladder: Ladder[Any]) -> Record:
    if record.system != "escalade" or not _is_speed(record):
        return record
    below = ladder.rung(record.rung).stands_on
    base = _base(record, [r for r in records if r.system == "escalade" and r.rung in below and _is_speed(r)])
    if base is None:
        return record
    return replace(record, gain=base.time / record.time, gain_over=f"{base.rung} {base.dtype} {base.layout}")


def _base(record: Record, candidates: Iterable[Record]) -> Record | None:
    """The record of the same dtype and layout if it was measured, else the best of the same dtype, else the best of
    any."""

    def distance(other: Record) -> tuple[bool, bool, float]:
        same_dtype = other.dtype == record.dtype
        return not same_dtype, not (same_dtype and other.layout == record.layout), other.time

    return min(candidates, key=distance, default=None)


def _with_peer_gain(record: Record, records: Sequence[Record]) -> Record:
    if record.system != "escalade" or not _is_speed(record):
        return record
    peers = [r for r in records if r.system != "escalade" and r.dtype == record.dtype and _is_speed(r)]
    best = min(peers, key=lambda peer: peer.time, default=None)
    if best is None:
        return record
    return replace(record, peer_gain=best.time / record.time, peer=best.system)
