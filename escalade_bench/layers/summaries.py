"""Summaries of the records of layers: ours beside the fastest peer, means over a set, and FP8 beside fp16."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from escalade_bench.layers.sets import Layer
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import against_best

Measured = Mapping[tuple[str, object], Sequence[Record]]
"""Records by a layer's key."""


@dataclass(frozen=True)
class Row:
    """A layer with our record and its fastest peer's, if they were timed."""

    layer: Layer
    ours: Record | None
    peer: Record | None
    ratio: float | None = None
    """The fastest peer's time divided by ours; None if either is missing."""
    note: str = ""
    """Important peers that were not measured, or the reason why we have no time."""


@dataclass(frozen=True)
class Summary:
    """A summary over the layers of a set with times of ours and a peer's."""

    layers: int
    geomean: float
    worst: Row
    ours_us: float
    """Sum of microseconds over all layers of the network."""
    peers_us: float
    tflops: float
    left_out: int = 0
    """Layers without a timed peer."""
    slower: int = 0
    """Layers with a faster peer."""

    def __str__(self) -> str:
        without = f" (and {self.left_out} without a peer)" if self.left_out else ""
        return (
            f"{self.layers} layers{without}: {self.geomean:.3f}× the fastest peer's speed in the geometric mean; "
            f"{self.slower} slower than it, worst {self.worst.ratio or 0.0:.3f}× ({self.worst.layer.problem.name}); in "
            f"all {self.ours_us:,.0f} µs "
            f"({self.tflops:.0f} TFLOP/s) against {self.peers_us:,.0f} µs, {self.peers_us / self.ours_us:.3f}×"
        )


def rows(layers: Iterable[Layer], measured: Measured) -> list[Row]:
    return [_row(layer, measured.get(layer.key, ())) for layer in layers]


def _row(layer: Layer, records: Sequence[Record]) -> Row:
    found = against_best(records)
    failed = [f"failed: {r.failure.splitlines()[0]}" for r in records if not r.is_peer and r.failure]
    return Row(
        layer, found.ours, found.peer, found.ratio, found.note or ("" if found.ours else "".join(failed[:1]))
    )


def summary(found: Sequence[Row]) -> Summary | None:
    """Return the summary, or None if nothing can be compared."""
    both = [(row, row.ours, row.peer, row.ratio) for row in found]
    compared = [(row, ours, peer, ratio) for row, ours, peer, ratio in both if ours and peer and ratio]
    if not compared:
        return None
    ours_us = sum(row.layer.count * ours.time for row, ours, _, _ in compared)
    flops = sum(row.layer.count * row.layer.problem.flops for row, *_ in compared)
    return Summary(
        len(compared),
        statistics.geometric_mean(ratio for *_, ratio in compared),
        min(compared, key=lambda one: one[3])[0],
        ours_us,
        sum(row.layer.count * peer.time for row, _, peer, _ in compared),
        flops / ours_us / 1e6,
        sum(row.ours is not None for row in found) - len(compared),
        sum(ratio < 1 for *_, ratio in compared),
    )


def over_fp16(found: Collection[Row]) -> list[tuple[Row, float]]:
    """Return the speed of FP8 relative to our own fp16, for layers with both times."""
    halves = {
        (row.layer.operation, row.layer.problem.name): row.ours
        for row in found
        if row.ours and row.layer.problem.dtype == "fp16"
    }
    compared = []
    for row in found:
        half = halves.get((row.layer.operation, row.layer.problem.name))
        if row.ours and half and row.layer.problem.dtype == "fp8":
            compared.append((row, half.time / row.ours.time))
    return compared
