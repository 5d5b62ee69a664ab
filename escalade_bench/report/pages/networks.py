"""docs/networks.md: whole networks beside their peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from escalade.ops import OPERATIONS
from escalade_bench.evaluation import FEW
from escalade_bench.evaluation import SUFFIX as EVALUATION
from escalade_bench.measure.figures import fastest
from escalade_bench.measure.records import Record
from escalade_bench.networks import host
from escalade_bench.networks.op_times import FORMS, OPERATION
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers.comparison import TRAINING_STEP
from escalade_bench.peers.registry import TITLES
from escalade_bench.report import cells, compare, document, plots
from escalade_bench.report.compare import Cards, Compared, Verdict, grouped, named, of, place
from escalade_bench.report.document import Heading, Item, Plot, origin
from escalade_bench.report.pages import training
from escalade_bench.report.table import Column, Table, columns

PHASES = "_phases"
COMPARED = {"": "Batches", "_score": "Anomaly scores"}
"""Parts of a network's records that have peers, by the suffix of their workload."""
_PARTS = (*COMPARED, "_accuracy", EVALUATION, PHASES, "_layer_kinds", "_cpu", "_stream")


def names(records: Sequence[Record]) -> list[str]:
    """The measured networks."""
    found = {record.workload for record in records}
    return [name for name in WORKLOADS if found & {name + part for part in _PARTS}]


def page(cards: Cards) -> list[Item]:
    command = "escalade bench resnet18 --results results"
    return document.page("Networks, measured", compare.LEGEND, cards, _sections, command, verdicts)


def _sections(own: Sequence[Record]) -> Iterator[Item]:
    found = names(own)
    yield from [Heading(2, own[0].gpu)] if found else []
    for name in found:
        yield from section(name, own)


def by_name(
    own: Sequence[Record], suffix: str = "", wanted: Sequence[str] = ()
) -> Iterator[tuple[str, Compared]]:
    """Yield the comparisons of networks, or of their training steps, by network, dtype and batch."""
    for row in compare.compared(of(own, *(name + suffix for name in wanted or WORKLOADS))):
        yield f"{row.ours.workload} {row.ours.dtype} b{row.ours.batch}", row


def verdicts(own: Sequence[Record]) -> list[Verdict]:
    return [Verdict.of(name, by_name(own, wanted=[name])) for name in names(own)]


def section(name: str, records: Sequence[Record]) -> Iterator[Item]:
    """Yield all results of a network."""
    own = of(records, *(name + part for part in _PARTS))
    convolutions = of(records, OPERATION) if name == "lenet" else []
    yield Heading(3, name)
    yield origin([*own, *convolutions])
    batches = [r for r in own if r.workload == name and r.images_per_s]
    if batches:
        title = f"{name} by batch, on an {own[0].gpu}"
        yield Plot(named(name, own[0]), title, partial(plots.by_batch, batches, title))
    yield from (found.table for found in op_times(convolutions))
    for suffix in _PARTS:
        yield from tables(of(own, name + suffix), suffix)


def terminal_tables(records: Sequence[Record]) -> Iterator[Table]:
    """The tables of any parts of a run."""
    for workload, own in grouped(records, lambda r: r.workload).items():
        on_twin = ", on the twin: no speeds" if any(r.timing == "twin" for r in own) else ""
        yield from (found.table.titled(found.table.title + on_twin) for found in op_times(own))
        suffix = next(s for s in _MAKERS if workload.endswith(s))
        size = own[0].problem.partition("_")[0]
        what = f"rows of {size}" if compare.of_rows(own) else f"{size}² images"
        for table in tables(own, suffix) if workload != OPERATION else ():
            yield table.titled(f"{workload.removesuffix(suffix)}, {what}: {table.title}")


def tables(records: Sequence[Record], suffix: str) -> Iterator[Table]:
    """The tables of one workload."""
    yield from _MAKERS[suffix](records) if records else ()


def _compared(what: str, records: Sequence[Record]) -> Iterator[Table]:
    yield from compare.both_clocks(records, what)
    if any(r.peak_bytes for r in records) and not compare.of_rows(records):
        yield compare.memory(records, f"{what}: peak memory in MiB")


def _accuracy(records: Sequence[Record]) -> Iterator[Table]:
    labeled = [record for record in records if record.accuracy is not None]
    if labeled:
        yield _labeled_accuracy(labeled)
    if others := [record for record in records if record.accuracy is None]:
        shown = columns("dtype|answers=note|error at the logits=error|allowed")
        yield Table(shown, others, title="Against float64 on the CPU")


def _labeled_accuracy(records: Sequence[Record]) -> Table:
    """A row for each dtype, a column for each number of images; the first row is float64."""
    counts = sorted({r.batch for r in records})
    exact = {r.batch: r.note.removeprefix("float64: ") for r in records}
    rows: list[tuple[Any, ...]] = [("float64", *(exact.get(count, "") for count in counts), "", records)]
    for dtype, own in sorted(grouped(records, lambda r: r.dtype).items(), key=lambda item: place(item[0])):
        right = {r.batch: f"{r.accuracy:.4f}" + (" (wrong logits)" if r.failure else "") for r in own}
        worst = max((r.error for r in own if r.error is not None), default=None)
        rows.append((dtype, *(right.get(count, "") for count in counts), cells.error(worst), own))
    heads = ("dtype", *(f"first {count:,} images" for count in counts), "error at the logits")
    return Table.of("|".join(heads), rows, "Fashion-MNIST: right answers")


def phases(records: Sequence[Record]) -> Iterator[Table]:
    shown = columns("dtype|phase=rung|what it is=note")
    shown.append(Column("µs, host to host", lambda r: cells.whole(r.wall_us)))
    shown += columns("µs on the GPU=µs|images/s|gain|over|MiB on the GPU=MiB")
    yield Table(shown, records, title="One image, phase by phase")


def _stream(records: Sequence[Record]) -> Iterator[Table]:
    def share_of(record: Record, *bounds: str) -> str:
        """Return the rate of a stream relative to its slowest bound; empty if one was not timed by the same clock."""
        key = record.dtype, record.batch, record.timing
        same = [r for r in records if (r.dtype, r.batch, r.timing) == key and r.median_us is not None]
        found = [r.time for r in same if r.rung in bounds]
        if record.rung.endswith("alone") or record.median_us is None or len(found) < len(bounds):
            return ""
        return cells.share(max(found) / record.median_us)

    shown = [
        *columns("dtype|what=rung|batch|µs per batch=µs|images/s"),
        Column("of the slower alone", lambda r: share_of(r, "compute alone", "copies alone")),
        Column("of the copies alone", lambda r: share_of(r, "copies alone")),
        Column("GPU busy", lambda r: cells.written("{:.0f}%", r.config.get("gpu_pct"))),
        Column("PCIe in, MB/s", lambda r: cells.whole(r.config.get("pcie_in_mbps"))),
        Column("PCIe out, MB/s", lambda r: cells.whole(r.config.get("pcie_out_mbps"))),
    ]
    yield Table(shown, records, title="uint8 images from host memory")


def on_cpu(records: Sequence[Record]) -> Iterator[Table]:
    """The CPU's call, a replay on the GPU, and a call from host memory to it."""
    there = {(r.dtype, r.batch): r.wall_us for r in records if r.system == host.CPU}
    ours = sorted((r for r in records if not r.is_peer), key=lambda r: (place(r.dtype, host.DTYPES), r.batch))
    rows = [
        (r.dtype, f"{r.batch:,}", cells.milliseconds(us), cells.milliseconds(r.median_us) or cells.reason(r),
         cells.quotient(us, r.median_us), cells.milliseconds(r.wall_us), cells.quotient(us, r.wall_us),
         cells.whole(r.images_per_s), cells.mebibytes(r.peak_bytes), [r])
        for r in ours
        for us in (there.get((r.dtype, r.batch)),)
    ]  # fmt: skip
    note = next((r.note for r in records if r.is_peer), "")
    yield Table.of(
        "dtype|>batch|>CPU, ms|>GPU, ms|>speedup|>GPU, host to host, ms|>speedup, host to host|>images/s|"
        ">MiB on the GPU",
        rows, "The CPU and the GPU", legend=f"CPU: {note}." if note else "",
    )  # fmt: skip


def by_kind(records: Sequence[Record]) -> Iterator[Table]:
    """A row for each dtype and kind of layer; the last is the network as a whole."""
    order = (*host.KINDS, host.OTHERS, host.TOTAL)
    found = grouped(records, lambda r: (place(r.dtype, host.DTYPES), place(r.rung, order), r.rung))

    rows = []
    for own in (found[key] for key in sorted(found)):
        cpu = next((r.wall_us for r in own if r.is_peer), None)
        gpu = next((r.median_us for r in own if not r.is_peer), None)
        times = cells.milliseconds(cpu), cells.milliseconds(gpu), cells.quotient(cpu, gpu)
        rows.append((own[0].dtype, cells.who(own[0]), *times, own))
    yield Table.of("dtype|layer|>CPU, ms|>GPU, ms|>speedup", rows, "One image, by kind of layer")


def evaluation(records: Sequence[Record]) -> Iterator[Table]:
    """Return the table of accuracy with real weights."""

    def said(r: Record, name: str, form: str) -> str:
        return "" if r.is_peer else cells.written(form, r.config.get(name))

    rows = [
        ("PyTorch" if r.is_peer else "Escalade", r.dtype, f"{r.batch:,}",
         cells.written("{:.2%}", r.accuracy) or cells.reason(r), cells.written("{:.2%}", r.config.get("top5")),
         said(r, "agreement", "{:.2%}"), said(r, "difference", "{:.2g}"), cells.error(r.error),
         cells.error(r.tolerance), [r])
        for r in records
    ]  # fmt: skip
    weights = ", ".join(sorted({f"`{r.config['weights']}`" for r in records if "weights" in r.config}))
    legend = (
        f"Weights: {weights}. *Agreement* is with the top-1 of PyTorch's fp32, *difference* the largest of a logit "
        "from PyTorch's, *error* that of all logits, relative to them."
    )
    heads = f"system|dtype|>images|>top-1|>top-{FEW}|>agreement|>difference|>error|>allowed"
    yield Table.of(heads, rows, "Right answers with real weights", legend=legend)


STORAGES = {"fp32": ("fp32", "tf32"), "fp16": ("fp16",)}
"""Dtypes of the tensors, and those in which products of them may be formed."""
_PEERS = {
    "torch-nchw": "PyTorch (cuDNN), NCHW",
    "torch-nhwc": "PyTorch (cuDNN), channels_last",
    "torch-compile": TITLES["torch-compile"],
}


@dataclass(frozen=True)
class Variant:
    """One way to compute both convolutions, each in its faster layout."""

    name: str
    first: Record
    second: Record

    @property
    def sum(self) -> float:
        return self.first.time + self.second.time

    @property
    def records(self) -> tuple[Record, Record]:
        return self.first, self.second


def milliseconds(us: float) -> str:
    return f"{us / 1000:.3f} ms"


@dataclass(frozen=True)
class OpTimes:
    """The variants of one table, PyTorch's first; `form` is what follows the convolutions, empty for nothing."""

    form: str
    storage: str
    batch: int
    variants: tuple[Variant, ...]

    @property
    def table(self) -> Table:
        form = f" {self.form}" if self.form else ""
        title = f"Op times{form}, {self.storage} tensors, {self.batch:,} images"
        rows = (
            (v.name, *map(milliseconds, (v.first.time, v.second.time, v.sum)), v.records)
            for v in self.variants
        )
        return Table.of("Variant|>Op-Time 1|>Op-Time 2|>Sum of Op-Times", rows, title)


def op_times(records: Sequence[Record]) -> Iterator[OpTimes]:
    """One for each form and dtype of the tensors, at the largest batch that both convolutions were timed at."""
    timed = [r for r in records if r.workload == OPERATION and r.median_us is not None]
    for form, names in FORMS.items():
        for storage, dtypes in STORAGES.items():
            own = [r for r in timed if r.dtype in dtypes]
            for batch in sorted({r.batch for r in own}, reverse=True):
                first, second = ([r for r in own if r.problem == name.format(batch=batch)] for name in names)
                variants = tuple(_variants(first, second))
                if variants:
                    yield OpTimes(form, storage, batch, variants)
                    break


def _variants(first: Sequence[Record], second: Sequence[Record]) -> Iterator[Variant]:
    ways = [(name, (system, "")) for system, name in _PEERS.items()]
    ways += [(rung.name, ("escalade", rung.name)) for rung in OPERATIONS[OPERATION].ladder]
    for name, way in ways:
        for dtype in dict.fromkeys(r.dtype for r in first):
            found = [
                fastest(r for r in some if (r.system, r.rung, r.dtype) == (*way, dtype))
                for some in (first, second)
            ]
            if found[0] and found[1]:
                yield Variant(name + (" (TF32)" if dtype == "tf32" else ""), found[0], found[1])


_MAKERS: dict[str, Callable[[Sequence[Record]], Iterator[Table]]] = {
    **{suffix: partial(_compared, what) for suffix, what in COMPARED.items() if suffix},
    TRAINING_STEP: partial(_compared, "Training step"),
    training.ABLATION: training.ablation_tables,
    training.PAIRS: training.pair_tables,
    "_accuracy": _accuracy,
    PHASES: phases,
    "_stream": _stream,
    "_cpu": on_cpu,
    "_layer_kinds": by_kind,
    EVALUATION: evaluation,
    "": partial(_compared, COMPARED[""]),
}
"""Makers of a workload's tables, by the suffix of its name."""
