"""Ours against the best of all peers, by one clock; and which peers must have been measured before there is a ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escalade.measure.records import Record

Clock = Callable[[Record], float | None]
"""The microseconds of a record by one way of taking time; None if it has none."""
Required = tuple[tuple[str, ...], ...]
"""Systems that a ratio needs: of each group one must have been timed."""

ON_DEVICE = ("graph", "eager")
"""How times on the device are taken (see `escalade.device.timing`); all others are by the wall clock."""
_GRAPH, _COMPILE, _JAX = ("torch-graph",), ("torch-compile",), ("jax",)
_NETWORK: Required = (_GRAPH, _COMPILE)
COVERAGE = "coverage_"
"""How the workloads begin that are many networks of one module."""
TRAINING_STEP = "_training_step"
"""How the workloads end that are whole steps of training, behind the network's name."""
_EITHER_MODE: Required = (_GRAPH, (*_COMPILE, "torch-compile-default"))
_FUSED: Required = (("cudnn-graph", "cudnn-fused-nhwc", "cudnn-fused-nchw", "triton", *_COMPILE),)
_OPERATOR: Required = (("torch-nhwc", "torch-nchw", "torch-flat", "torch"),)


def on_device(record: Record) -> float | None:
    """The time on the device of one call."""
    return record.median_us if record.timing in ON_DEVICE else None


def by_clock(record: Record) -> float | None:
    """The wall-clock time of one call as a user makes it."""
    return record.wall_us


def required(record: Record, clock: Clock) -> Required:
    """Which peers a ratio of this workload needs.

    Whole networks need PyTorch as one CUDA graph and torch.compile (max-autotune); ResNets by the clock JAX too, which
    has no graph to be timed on the device. Of many networks, and of steps of training, torch.compile's default mode is
    enough. A layer needs
    torch.compile, but for FP8, which that has no convolutions in; with an epilogue it needs a peer that does it in one
    launch. Anything else needs PyTorch's operator: gradients of convolutions, which torch.compile leaves to it, among
    them.
    """
    if record.workload == "layers":
        eager = _FUSED if "_bias" in record.problem else _OPERATOR
        return eager if record.dtype == "fp8" else (*eager, _COMPILE)
    if record.workload.startswith(COVERAGE) or record.workload.endswith(TRAINING_STEP):
        return _EITHER_MODE
    if record.layout == "flat" or record.workload.partition("_")[0] in ("lenet", "spectral"):
        return _NETWORK
    if record.workload.startswith("resnet"):
        return _NETWORK if clock is on_device else (*_NETWORK, _JAX)
    return _OPERATOR


@dataclass(frozen=True)
class Against:
    """How many times as fast as the best peer we are by one clock, or why that is not known."""

    ours: Record | None = None
    peer: Record | None = None
    """The fastest of those that were measured."""
    ratio: float | None = None
    why: str = ""


def against_best(records: Sequence[Record], clock: Clock = on_device) -> Against:
    """Our fastest record of one problem in one dtype beside the best peer's; there is a ratio only where no required
    peer is missing."""
    ours = _fastest([r for r in records if not r.is_peer], clock)
    peers = [r for r in records if r.is_peer]
    peer = _fastest(peers, clock)
    if ours is None:
        return Against(None, peer)
    timed = {r.system for r in peers if clock(r) is not None}
    missing = [group for group in required(ours, clock) if not timed.intersection(group)]
    if missing:
        return Against(ours, peer, why=_missing(missing))
    assert peer is not None
    best = clock(peer)
    mine = clock(ours)
    assert best is not None and mine is not None
    if clock is on_device:
        faster = [r for r in peers if r.timing not in ON_DEVICE and r.median_us and r.median_us < best]
        if faster:  # even with the clock's overhead: it is the best, and its time on the device is not known
            return Against(ours, peer, why=f"{faster[0].system} is faster, and has no device time")
    return Against(ours, peer, best / mine)


def _missing(groups: Sequence[tuple[str, ...]]) -> str:
    if _FUSED[0] in groups:
        return "no fused peer"
    return "not measured: " + ", ".join(group[0] for group in groups)


def _fastest(records: Sequence[Record], clock: Clock) -> Record | None:
    timed = [(time, r) for r in records if (time := clock(r)) is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None
