"""docs/layers.md: single layers beside their peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted
from escalade_bench.layers import DIRECTIONS, SETS, WORKLOADS, Layer, Part, parts
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import Against, against_best
from escalade_bench.report import cells, document
from escalade_bench.report.compare import Cards, Verdict, grouped, of, place
from escalade_bench.report.document import Heading, Item, origin
from escalade_bench.report.table import Table

_TITLES = ("Forward", "Gradients of inputs", "Gradients of weights")
_LEGEND = (
    "Each layer is verified, then timed in turns with its peers in one run. × is how often the network has the layer; "
    "% of floor is the time that the card's ceilings allow divided by the time it took; ratio is the fastest peer's "
    "time divided by ours: above 1× we are faster. *note* names a peer that matters and was not measured: "
    "torch.compile, or for a layer with an epilogue one that computes it in one launch (cuDNN's fused call or graph, "
    "torch.compile)."
)


@dataclass(frozen=True, kw_only=True)
class Row(Against):
    """Our fastest record of a layer beside the best peer's; the note also says why we have no time."""

    layer: Layer


def rows(layers: Iterable[Layer], measured: Mapping[tuple[str, object], Sequence[Record]]) -> list[Row]:
    """Compare every layer with its peers, by the records of its key."""
    found = []
    for layer in layers:
        records = measured.get(layer.key, ())
        one = against_best(records)
        failed = [f"failed: {cells.first_line(r.failure)}" for r in records if not r.is_peer and r.failure]
        note = one.note or ("" if one.ours else "".join(failed[:1]))
        found.append(Row(one.ours, one.peer, one.ratio, note, layer=layer))
    return found


def summary(found: Sequence[Row]) -> str:
    """Return the comparison of a network's layers in one sentence; empty if nothing can be compared."""
    compared = [(r, r.ours, r.peer, r.ratio) for r in found if r.ours and r.peer and r.ratio]
    if not compared:
        return ""
    ratios = {row.layer.problem.name: ratio for row, _, _, ratio in compared}
    worst = min(ratios, key=lambda name: ratios[name])
    ours_us = sum(row.layer.count * ours.time for row, ours, _, _ in compared)
    peers_us = sum(row.layer.count * peer.time for row, _, peer, _ in compared)
    flops = sum(row.layer.count * row.layer.problem.flops for row, *_ in compared)
    left_out = sum(row.ours is not None for row in found) - len(compared)
    return (
        f"{counted(len(compared), 'layer')}{f' (and {left_out} without a peer)' if left_out else ''}: "
        f"{statistics.geometric_mean(ratios.values()):.3f}× the fastest peer's speed in the geometric mean; "
        f"{sum(ratio < 1 for ratio in ratios.values())} slower than it, worst {ratios[worst]:.3f}× ({worst}); in all "
        f"{ours_us:,.0f} µs ({flops / ours_us / 1e6:.0f} TFLOP/s) against {peers_us:,.0f} µs, {peers_us / ours_us:.3f}×"
    )


def over_fp16(found: Sequence[Row]) -> dict[str, float]:
    """Return the speed of FP8 relative to our own fp16, by problem, for layers with both times."""
    times = {
        (r.layer.operation, r.layer.problem.name, r.layer.problem.dtype): r.ours.time for r in found if r.ours
    }
    pairs = {key: times.get((*key[:2], "fp16")) for key in times if key[2] == "fp8"}
    return {key[1]: half / times[key] for key, half in pairs.items() if half}


def measured(direction: str, records: Sequence[Record]) -> list[tuple[Part, list[Row]]]:
    """The rows of each set in every dtype and batch, as far as its layers have records; then the layers of no set."""
    found = grouped(of(records, WORKLOADS[direction]), lambda r: (r.problem, r.dtype))

    def rows_of(part: Part) -> list[Row]:
        own: dict[tuple[str, object], list[Record]] = {
            layer.key: found.get((layer.problem.name, layer.problem.dtype), []) for layer in part.layers
        }
        return rows([layer for layer in part.layers if own[layer.key]], own)

    shown: list[tuple[Part, list[Row]]] = []
    left = dict.fromkeys(found)
    for part in _possible(direction, found):
        here = rows_of(part)
        keys = {(row.layer.problem.name, row.layer.problem.dtype) for row in here}
        if keys & left.keys():
            shown.append((part, here))
            left = {key: None for key in left if key not in keys}
    for dtype in sorted({dtype for _, dtype in left}, key=place):
        names = [problem for problem, own in left if own == dtype]
        alone = parts(names, (0,), (dtype,), direction)  # a convolution's name has its batch
        title = f"others, {direction.replace('_', ' ')}, {dtype}"
        other = Part("", title, tuple(layer for part in alone for layer in part.layers))
        shown.append((other, rows_of(other)))
    return shown


def _possible(direction: str, found: dict[tuple[str, str], list[Record]]) -> Iterator[Part]:
    for dtype in sorted({dtype for _, dtype in found}, key=place):
        batches = sorted({r.batch for (_, own), some in found.items() if own == dtype for r in some})
        for name in SETS:
            try:
                yield from parts((name,), batches, (dtype,), direction)
            except UnsupportedError:  # no set has every dtype
                continue


def table(title: str, rows: Sequence[Row]) -> Table:
    """Layers beside their fastest peers."""

    found = []
    for row in rows:
        ours, layer, peer = row.ours, row.layer, row.peer
        of_floor = f"{100 * ours.floor_us / ours.time:.1f}" if ours and ours.floor_us else ""
        note = "; ".join(filter(None, ("with its pool" * (layer.operation == "stem"), row.note)))
        took = cells.microseconds(ours), cells.whole(ours.tflops if ours else None), of_floor
        theirs = cells.microseconds(peer), cells.peer(peer), cells.times(row.ratio)
        rung = ours.rung if ours else "failed"
        found.append((layer.problem.name, rung, layer.count, *took, *theirs, note, (ours, peer)))
    heads = "`layer|rung|>×|>µs|>TFLOP/s|>% of floor|>peer's µs|best peer|>ratio|note"
    return Table.of(heads, found, title)


def page(cards: Cards) -> list[Item]:
    command = "escalade bench layers resnet50 --results results"
    return document.page("Layers, measured", _LEGEND, cards, _section, command, verdicts)


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    found = []
    for part, own in (one for direction in DIRECTIONS for one in measured(direction, records)):
        ratios = {row.layer.problem.name: row.ratio for row in own if row.ratio}
        wrong = [row.layer.problem.name for row in own if row.ours is None]
        found.append(
            Verdict(f"layers of {part.title}", ratios, {}, wrong, [row.ours for row in own if row.ours])
        )
    return found


def _section(records: Sequence[Record]) -> Iterator[Item]:
    if used := of(records, *WORKLOADS.values()):
        yield from (Heading(2, used[0].gpu), origin(used))
    for direction, title in zip(DIRECTIONS, _TITLES, strict=True):
        found = measured(direction, records)
        yield from [Heading(3, title)] if found else []
        for part, own in found:
            yield table(part.title, own)
            if total := summary(own):
                yield f"{total}."
