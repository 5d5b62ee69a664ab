"""Compare our fastest record with the best peer, both timed by the same clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.measure.currency import same_versions
from escalade_bench.measure.records import Record

Clock = Callable[[Record], float | None]
"""Returns the microseconds of a record by one clock, or None if it has none."""

ON_DEVICE = ("graph", "eager")
"""Kinds of timing that are device times (see `escalade.device.timing`); all others are wall-clock times."""
COVERAGE = "coverage_"
"""Prefix of the workloads that hold many networks of one module."""
TRAINING_STEP = "_training_step"
"""Suffix of the workloads that are whole training steps, after the network's name."""
_COMPILED = ("torch-compile", "torch-compile-default")
_FUSED = ("cudnn-graph", "cudnn-fused-nhwc", "cudnn-fused-nchw", "torch-compile")


def on_device(record: Record) -> float | None:
    """Return the device time of one call."""
    return record.median_us if record.timing in ON_DEVICE else None


def by_clock(record: Record) -> float | None:
    """Return the wall-clock time of one call, as a user makes it."""
    return record.wall_us


def in_a_row(record: Record) -> float | None:
    """Return the wall-clock time per call of calls in a row, for a system without a device time."""
    return record.median_us if record.timing not in ON_DEVICE else None


@dataclass(frozen=True)
class Against:
    """Our speed relative to the best peer by one clock, and what limits the comparison."""

    ours: Record | None = None
    peer: Record | None = None
    """The fastest peer that was measured."""
    ratio: float | None = None
    """The peer's time divided by ours: above 1 we are faster. None if either was not timed."""
    note: str = ""
    """Important peers that were not measured, or measured with other versions."""


def against_best(records: Sequence[Record], clock: Clock = on_device) -> Against:
    """Compare our fastest record of one problem and dtype with the best peer, whatever the result.

    Peers that were measured with the same PyTorch, CUDA and cuDNN count, of any commit. If there are none, the others
    do, and the note gives their versions. A peer without a device time whose calls in a row take less than the fastest
    device time is the best one: its launches count too, so the ratio is an upper bound, which the note says.
    """
    ours = _fastest([r for r in records if not r.is_peer], clock)
    peers = [r for r in records if r.is_peer]
    if ours is None:
        return Against(None, _fastest(peers, clock))
    same = [r for r in peers if same_versions(r.versions, ours.versions)]
    peer = _fastest(same, clock) or _fastest(peers, clock)
    mine, best = clock(ours), clock(peer) if peer else None
    if peer is None or not mine or not best:
        return Against(ours, peer, note="no peer")
    notes = [_missing(ours, {r.system for r in peers if clock(r) is not None})]
    if peer not in same:
        notes.append("peer's PyTorch is " + peer.versions.get("torch", "unknown"))
    if clock is on_device:
        in_rows = _fastest(same, in_a_row)
        if in_rows is not None and in_rows.median_us and in_rows.median_us < best:
            peer, best = in_rows, in_rows.median_us
            notes.append(f"at most: {peer.system} is timed by the clock, calls in a row")
    return Against(ours, peer, best / mine, "; ".join(filter(None, notes)))


def _missing(ours: Record, timed: set[str]) -> str:
    """Return which important peer has no time: a fused one for a layer with an epilogue, else torch.compile."""
    if ours.workload == "layers":
        if "_bias" in ours.problem and not timed.intersection(_FUSED):
            return "no fused peer"
        return "" if ours.dtype in QUANTIZED or "torch-compile" in timed else "no torch.compile"
    is_network = not ours.rung and "_gradient" not in ours.workload
    return "no torch.compile" if is_network and not timed.intersection(_COMPILED) else ""


def _fastest(records: Sequence[Record], clock: Clock) -> Record | None:
    timed = [(time, r) for r in records if (time := clock(r)) is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None
