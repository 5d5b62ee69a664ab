"""The verdict at a glance: a tile for the networks, for each set of many networks, and for each set of layers."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.layers import summaries
from escalade.bench.layers.sets import DIRECTIONS
from escalade.bench.peers.comparison import by_clock, on_device
from escalade.measure.records import Record
from escalade.report import coverage_rows
from escalade.report.html.verdict import Row
from escalade.report.layer_pages import Found


@dataclass(frozen=True)
class Tile:
    """How many times as fast as its peers a set is in the geometric mean, and how that is made up."""

    title: str
    ratio: float
    details: tuple[str, ...]


def all_tiles(found: Sequence[Row], records: Sequence[Record]) -> Iterator[Tile]:
    """What one card's records, of which the rows are made, come to."""
    yield from _networks(found)
    for part in coverage_rows.parts(records):
        yield from _coverage(part)
    for direction in DIRECTIONS:
        layers = Found.of(direction, records)
        for layer_set in layers.parts():
            total = summaries.summary(layers.rows(layer_set))
            if total:
                yield _layers(layer_set.title, total)


def _networks(found: Sequence[Row]) -> Iterator[Tile]:
    ratios = [ratio for row in found if (ratio := row.device.ratio)]
    calls = [ratio for row in found if (ratio := row.call.ratio)]
    if not ratios:
        return
    details = [
        f"{_no_slower(ratios)} no slower than the best of all peers on the device, {min(ratios):.2f}× at worst"
    ]
    if calls:
        details.append(f"by the clock {_no_slower(calls)}, {statistics.geometric_mean(calls):.2f}×")
    if lacking := len(found) - len(ratios):
        details.append(f"{lacking} more lack a peer")
    yield Tile("Networks and steps of training", statistics.geometric_mean(ratios), tuple(details))


def _coverage(part: coverage_rows.Part) -> Iterator[Tile]:
    ratios, calls = part.ratios(on_device), part.ratios(by_clock)
    if not ratios:
        return
    slowest = min(ratios, key=lambda name: ratios[name])
    plans = [row for row in part.rows if row.fallbacks is not None]
    details = [
        f"{_no_slower(ratios.values())} no slower than the best peer, {ratios[slowest]:.2f}× at worst "
        f"({slowest})"
    ]
    if calls:
        details.append(
            f"by the clock {_no_slower(calls.values())}, {statistics.geometric_mean(calls.values()):.2f}×"
        )
    details.append(
        f"of {len(part.rows)} networks {sum(row.is_right for row in part.rows)} are right, "
        f"{sum(not row.fallbacks for row in plans)} leave nothing to PyTorch"
    )
    yield Tile(part.title, statistics.geometric_mean(ratios.values()), tuple(details))


def _layers(title: str, total: summaries.Summary) -> Tile:
    details = [
        f"{total.layers} layers beside the fastest peer, {total.worst.ratio or 0.0:.2f}× at worst "
        f"({total.worst.layer.problem.name})",
        f"in all {total.ours_us:,.0f} µs against {total.peers_us:,.0f} µs",
    ]
    if total.left_out:
        details.append(f"{total.left_out} more have no such peer")
    return Tile(f"Layers of {title}", total.geomean, tuple(details))


def _no_slower(ratios: Collection[float]) -> str:
    return f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}"
