"""docs/layers.md: single layers beside their peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from escalade.errors import UnsupportedError
from escalade_bench.layers import summaries
from escalade_bench.layers.sets import DIRECTIONS, SETS, Part, parts
from escalade_bench.layers.summaries import Row
from escalade_bench.measure.records import Record
from escalade_bench.report import cells
from escalade_bench.report.compare import Cards, grouped, of, place
from escalade_bench.report.document import Heading, Item, begun, not_measured, origin
from escalade_bench.report.table import Column, Table, text

WORKLOADS = {
    direction: "layers" if direction == "forward" else f"layers_{direction}" for direction in DIRECTIONS
}
_TITLES = ("Forward", "Gradients of inputs", "Gradients of weights")
_LEGEND = (
    "Each layer is verified, then timed in turns with its peers in one run. × is how often the network has the layer; "
    "% of floor is the time that the card's ceilings allow divided by the time it took; ratio is the fastest peer's "
    "time divided by ours: above 1× we are faster. *note* names a peer that matters and was not measured: "
    "torch.compile, or for a layer with an epilogue one that computes it in one launch (cuDNN's fused call or graph, "
    "torch.compile)."
)


def measured(direction: str, records: Sequence[Record]) -> list[tuple[Part, list[Row]]]:
    """The rows of each set in every dtype and batch, as far as its layers have records; then the layers of no set."""
    found = grouped(of(records, WORKLOADS[direction]), lambda r: (r.problem, r.dtype))

    def rows(part: Part) -> list[Row]:
        own: dict[tuple[str, object], list[Record]] = {
            layer.key: found.get((layer.problem.name, layer.problem.dtype), []) for layer in part.layers
        }
        return summaries.rows([layer for layer in part.layers if own[layer.key]], own)

    shown: list[tuple[Part, list[Row]]] = []
    left = dict.fromkeys(found)
    for part in _possible(direction, found):
        here = rows(part)
        keys = {(row.layer.problem.name, row.layer.problem.dtype) for row in here}
        if keys & left.keys():
            shown.append((part, here))
            left = {key: None for key in left if key not in keys}
    for dtype in sorted({dtype for _, dtype in left}, key=place):
        names = [problem for problem, own in left if own == dtype]
        alone = parts(names, (0,), (dtype,), direction)  # a convolution's name has its batch
        title = f"others, {direction.replace('_', ' ')}, {dtype}"
        other = Part("", title, tuple(layer for part in alone for layer in part.layers))
        shown.append((other, rows(other)))
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

    def of_floor(row: Row) -> str:
        ours = row.ours
        return f"{100 * ours.floor_us / ours.time:.1f}" if ours and ours.floor_us else ""

    def note(row: Row) -> str:
        pooled = "with its pool" if row.layer.operation == "stem" else ""
        return "; ".join(filter(None, (pooled, row.note)))

    shown = [
        text("layer", lambda row: row.layer.problem.name, style="code"),
        text("rung", lambda row: row.ours.rung if row.ours else "failed"),
        Column("×", lambda row: str(row.layer.count)),
        Column("µs", lambda row: cells.microseconds(row.ours)),
        Column("TFLOP/s", lambda row: cells.whole(row.ours.tflops if row.ours else None)),
        Column("% of floor", of_floor),
        Column("peer's µs", lambda row: cells.microseconds(row.peer)),
        text("best peer", lambda row: cells.peer(row.peer)),
        Column("ratio", lambda row: cells.times(row.ratio)),
        text("note", note),
    ]
    return Table(shown, rows, lambda row: filter(None, (row.ours, row.peer)), title)


def page(cards: Cards) -> list[Item]:
    made = begun("Layers, measured", _LEGEND)
    for records in cards.values():
        used = of(records, *WORKLOADS.values())
        made += [Heading(2, used[0].gpu), origin(used)] if used else []
        for direction, title in zip(DIRECTIONS, _TITLES, strict=True):
            found = measured(direction, records)
            made += [Heading(3, title)] if found else []
            for part, rows in found:
                made.append(table(part.title, rows))
                total = summaries.summary(rows)
                made += [f"{total}."] if total else []
    return made if len(made) > 3 else [*made, not_measured("escalade layers resnet50 --results results")]
