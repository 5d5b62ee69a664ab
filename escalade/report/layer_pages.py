"""Single layers beside their peers in docs/layers.md, from the records in results/."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.layers import summaries
from escalade.bench.layers.sets import DIRECTIONS, SETS, Layer, Part, parts
from escalade.bench.layers.summaries import Row
from escalade.errors import UnsupportedError
from escalade.measure.records import Record
from escalade.report.commits import newest, told
from escalade.report.layers import TEXTS, shown
from escalade.report.markdown import origin, table

WORKLOADS = {
    direction: "layers" if direction == "forward" else f"layers_{direction}" for direction in DIRECTIONS
}
TITLES = {
    "forward": "Forward",
    "input_gradient": "Gradients of inputs",
    "weight_gradient": "Gradients of weights",
}
_DTYPES = ("fp16", "bf16", "fp8", "tf32", "fp32")
_HEADER = (*TEXTS, "×", "µs", "TFLOP/s", "% of floor", "peer's µs", "ratio", "commit")
_LEGEND = (
    "Each layer is verified and then timed in turns with its peers, in one run. × is how many times the network has "
    "the layer; % of floor is the time that the card's ceilings allow over the time it took; ratio is the fastest "
    "peer's time over ours: above 1 we are faster. A layer has a ratio only where torch.compile was measured too, and "
    "with an epilogue only beside a peer that does it in one launch (cuDNN's fused call or graph, torch.compile); "
    "without, it says so, and is in no mean. Gradients are compared with PyTorch's and cuDNN's, which torch.compile "
    "leaves them to. A table is of one commit, or of the same kernels, and then each row says its commit.\n"
)


@dataclass(frozen=True)
class Found:
    """The records of one direction on one GPU: of every layer those of its last commit."""

    direction: str
    records: dict[tuple[str, str], list[Record]]
    """Records by problem and dtype."""

    @classmethod
    def of(cls, direction: str, records: Sequence[Record]) -> Found:
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            if record.workload == WORKLOADS[direction]:
                groups.setdefault((record.problem, record.dtype), []).append(record)
        return cls(direction, {key: newest(group) for key, group in groups.items()})

    def of_layer(self, layer: Layer) -> list[Record]:
        return self.records.get((layer.problem.name, layer.problem.dtype), [])

    def rows(self, part: Part) -> list[Row]:
        """What was last measured of the set, and what belongs to it."""
        shown = newest([record for layer in part.layers for record in self.of_layer(layer)])
        by_layer: dict[tuple[str, str], list[Record]] = {}
        for record in shown:
            by_layer.setdefault((record.problem, record.dtype), []).append(record)
        return summaries.rows(
            part.layers,
            {layer.key: by_layer.get((layer.problem.name, layer.problem.dtype), []) for layer in part.layers},
        )

    def parts(self) -> list[Part]:
        """The sets that were asked for or are all here, in every dtype and batch; then what is in none of them."""
        shown: list[Part] = []
        keys: set[tuple[str, object]] = set()
        for part in self._possible():
            here = [layer for layer in part.layers if self.of_layer(layer)]
            asked = any(part.name in shlex.split(r.command) for layer in here for r in self.of_layer(layer))
            new = {layer.key for layer in here} - keys
            if here and (asked or (len(here) == len(part.layers) and new)):
                shown.append(part)
                keys |= new
        return [*shown, *self._others(shown)]

    def _possible(self) -> Iterator[Part]:
        for dtype in sorted({dtype for _, dtype in self.records}, key=_DTYPES.index):
            own = [r for (_, name), records in self.records.items() if name == dtype for r in records]
            for name in SETS:
                try:
                    yield from parts((name,), sorted({r.batch for r in own}), (dtype,), self.direction)
                except UnsupportedError:  # no set has every dtype
                    continue

    def _others(self, shown: Sequence[Part]) -> Iterator[Part]:
        """The layers that were named one by one, in every dtype."""
        taken = {(layer.problem.name, layer.problem.dtype) for part in shown for layer in part.layers}
        left = [key for key in self.records if key not in taken]
        for dtype in sorted({dtype for _, dtype in left}, key=_DTYPES.index):
            names = [problem for problem, own in left if own == dtype]
            alone = parts(names, (0,), (dtype,), self.direction)  # a convolution's name has its batch
            title = f"others, {self.direction.replace('_', ' ')}, {dtype}"
            yield Part("", title, tuple(layer for part in alone for layer in part.layers))


def layers_page(records: dict[str, list[Record]], preferred: str) -> str:
    made = [
        "# Layers, measured\n\n"
        "Generated by `escalade tables` from the records in `results/`; do not edit. "
        "How it was measured: [measuring.md](measuring.md).\n\n" + _LEGEND
    ]
    for gpu in sorted(records, key=lambda name: (name != preferred, name)):
        found = [Found.of(direction, records[gpu]) for direction in DIRECTIONS]
        used = [r for one in found for group in one.records.values() for r in group]
        if used:
            made.append(f"\n## {used[0].gpu}\n\n{origin(used)}")
            made += [_direction(one) for one in found if one.records]
    if len(made) == 1:
        made.append("\nThere are no records yet. On a machine with a GPU: "
                    "`escalade layers resnet50 --results results`, then `escalade tables`.\n")  # fmt: skip
    return "".join(made)


def _direction(found: Found) -> str:
    shown = found.parts()
    made = [f"\n### {TITLES[found.direction]}\n"]
    for part in shown:
        rows = found.rows(part)
        made.append(f"\n#### {part.title}\n\n{_table(found, rows)}")
        total = summaries.summary(rows)
        if total:
            made.append(f"\n{total}.\n")
    made.append(_over_fp16([row for part in shown for row in found.rows(part)]))
    return "".join(made)


def _table(found: Found, rows: Sequence[Row]) -> str:
    lines = []
    commits = told([[r for r in (row.ours, row.peer) if r] for row in rows])
    for row, commit in zip(rows, commits, strict=True):
        line = shown(row) | {"commit": commit}
        line["layer"] = f"`{row.layer.problem.name}`" + (
            " with its pool" if row.layer.operation == "stem" else ""
        )
        line["rung"] = line["rung"] or _why_not(found.of_layer(row.layer))
        lines.append([line[heading] for heading in _HEADER])
    return table(_HEADER, lines, left=len(TEXTS))


def _why_not(records: Sequence[Record]) -> str:
    failure = next((r.failure for r in records if r.system == "escalade" and r.failure), "")
    return f"failed: {failure.splitlines()[0]}" if failure else "not measured"


def _over_fp16(rows: Iterable[Row]) -> str:
    compared = summaries.over_fp16({row.layer.key: row for row in rows}.values())
    if not compared:
        return ""
    mean = statistics.geometric_mean(ratio for _, ratio in compared)
    return f"\nfp8 over our own fp16: {mean:.3f}× in the geometric mean of {len(compared)} layers.\n"
