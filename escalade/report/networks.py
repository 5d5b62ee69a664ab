"""Records of whole networks as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.markup import escape

from escalade.bench.networks import cpu, layer_kinds
from escalade.bench.networks.op_times import OPERATION
from escalade.bench.peers.comparison import Clock, against_best, by_clock, on_device
from escalade.fitted import Table
from escalade.measure.records import Record
from escalade.report import cells, cpu_pages
from escalade.report.op_time_pages import HEADER, op_times
from escalade.report.rows import of_rows

Column = tuple[str, Callable[[Record], str]]


def network_tables(records: Sequence[Record]) -> Iterable[Table]:
    """One for each part of a run: the batches, the phases, the stream, the accuracy; and those of op times."""
    makers = {
        "_accuracy": _accuracy, "_phases": _phases, "_stream": _stream, cpu.SUFFIX: _cpu,
        layer_kinds.SUFFIX: _layer_kinds,
    }  # fmt: skip
    for workload in dict.fromkeys(record.workload for record in records):
        own = [record for record in records if record.workload == workload]
        if workload == OPERATION:
            yield from _op_times(own)
            continue
        make = next((make for suffix, make in makers.items() if workload.endswith(suffix)), _batches)
        if any(record.accuracy is not None for record in own):
            make = _right_answers
        yield make(own)


def _cpu(records: Sequence[Record]) -> Table:
    title = f"{records[0].workload.removesuffix(cpu.SUFFIX)}: the CPU and the GPU"
    return _plain(title, cpu_pages.BATCHES, cpu_pages.batch_rows(records), cpu_pages.TEXTS)


def _layer_kinds(records: Sequence[Record]) -> Table:
    title = f"{records[0].workload.removesuffix(layer_kinds.SUFFIX)}: one image, by kind of layer"
    return _plain(title, cpu_pages.LAYERS, cpu_pages.layer_rows(records), cpu_pages.TEXTS)


def _plain(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _op_times(records: Sequence[Record]) -> Iterable[Table]:
    on_twin = any(record.timing == "twin" for record in records)
    for found in op_times(records):
        table = Table(
            title=found.title + (", on the twin: no speeds" if on_twin else ""), title_justify="left"
        )
        table.add_column(HEADER[0], no_wrap=True)
        for name in HEADER[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for variant in found.variants:
            table.add_row(*map(escape, variant.cells))
        yield table


def failure(record: Record) -> str:
    """The one that failed, and the first line of why."""
    who = " ".join(
        filter(None, (record.workload, record.problem, record.dtype, cells.who(record), record.layout))
    )
    return f"{who}: {record.failure.splitlines()[0]}"


def _table(title: str, names: Sequence[str], columns: Sequence[Column], records: Sequence[Record]) -> Table:
    """The first columns are text; a failed record has nothing to show but that."""
    table = Table(title=escape(title), title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name, _ in columns[len(names) :]:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        shown = [escape(cell(record)) for _, cell in columns]
        if record.failure:
            why = escape(cells.reason(record)) if record.is_peer else "[red]failed[/]"
            shown = [*shown[: len(names)], why]
        table.add_row(*shown)
    return table


def _spread(record: Record) -> str:
    return (
        "" if record.p20_us is None or record.p80_us is None else f"{record.p20_us:.4g}–{record.p80_us:.4g}"
    )


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _mebibytes(record: Record) -> str:
    return "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:,.1f}"


def _batches(records: Sequence[Record]) -> Table:
    on_cpu = any(record.timing == "cpu" for record in records)
    rows = of_rows(records)
    columns: list[Column] = [
        ("dtype", lambda r: r.dtype),
        ("batch", lambda r: str(r.batch)),
        ("system", lambda r: r.system),
        ("layout", lambda r: r.layout),
    ]
    if on_cpu:
        columns.append(("µs of this CPU", lambda r: _microseconds(r.wall_us)))
    else:
        columns += [
            ("µs", lambda r: _microseconds(on_device(r))),
            ("p20–p80", lambda r: _spread(r) if on_device(r) else ""),
            ("vs best peer", _over_best(records, on_device)),
            ("µs a call", lambda r: _microseconds(by_clock(r))),
            ("calls vs best peer", _over_best(records, by_clock)),
        ]
    columns.append(("rows/s" if rows else "images/s", lambda r: cells.whole(r.images_per_s)))
    if rows and not on_cpu:
        columns += [
            ("GB/s", lambda r: cells.whole(r.gbps)),
            ("% of a copy", lambda r: cells.percent(r.copy_pct)),
        ]
    elif not on_cpu:
        columns += [
            ("TFLOP/s", lambda r: "" if r.tflops is None else f"{r.tflops:.1f}"),
            ("% ceiling", lambda r: cells.percent(r.peak_pct)),
        ]
    if not on_cpu:
        columns += [("× floor", cells.over_floor), ("MiB", _mebibytes)]
    columns.append(("error", lambda r: cells.error(r.error)))
    size = records[0].problem.partition("_")[0]
    title = f"{records[0].workload}, " + (f"rows of {size}" if rows else f"{size}² images")
    ordered = sorted(records, key=lambda r: (_order(records, r.dtype), r.batch, r.system != "escalade"))
    return _table(title, ("dtype", "batch", "system", "layout"), columns, ordered)


def _over_best(records: Sequence[Record], clock: Clock) -> Callable[[Record], str]:
    """How many times as fast as the best peer we are, on our own row; on a peer's nothing."""

    def cell(record: Record) -> str:
        if record.is_peer:
            return ""
        return cells.against(against_best([r for r in records if r.comparison == record.comparison], clock))

    return cell


def _order(records: Sequence[Record], dtype: str) -> int:
    return list(dict.fromkeys(record.dtype for record in records)).index(dtype)


def _phases(records: Sequence[Record]) -> Table:
    columns: list[Column] = [
        ("dtype", lambda r: r.dtype),
        ("phase", lambda r: r.rung),
        ("what it is", lambda r: r.note),
        ("µs, host to host", lambda r: _microseconds(r.wall_us)),
        ("µs on the GPU", lambda r: _microseconds(r.median_us)),
        ("images/s", lambda r: cells.whole(r.images_per_s)),
        ("gain", lambda r: cells.times(r.gain)),
        ("over", lambda r: r.gain_over),
        ("MiB on the GPU", _mebibytes),
        ("error", lambda r: cells.error(r.error)),
    ]
    table = _table(
        f"{records[0].workload.removesuffix('_phases')}: one image, phase by phase",
        ("dtype", "phase", "what it is"), columns, records,
    )  # fmt: skip
    table.columns[2].no_wrap = False
    return table


def _stream(records: Sequence[Record]) -> Table:
    columns: list[Column] = [
        ("dtype", lambda r: r.dtype),
        ("what", lambda r: r.rung),
        ("batch", lambda r: str(r.batch)),
        ("µs a batch", lambda r: _microseconds(r.median_us)),
        ("images/s", lambda r: cells.whole(r.images_per_s)),
        ("of the slower alone", lambda r: cells.share(share_of_slower(r, records))),
        ("of the copies alone", lambda r: cells.share(share_of_copies(r, records))),
    ]
    title = f"{records[0].workload.removesuffix('_stream')}: uint8 images from host memory"
    return _table(title, ("dtype", "what"), columns, records)


def share_of_slower(record: Record, records: Sequence[Record]) -> float | None:
    """The rate of a stream over that of the slower of compute and copies: they overlap, and neither can be beaten."""
    return _share_of(record, records, ("compute alone", "copies alone"))


def share_of_copies(record: Record, records: Sequence[Record]) -> float | None:
    """The rate of a stream over that of plain copies of the same bytes."""
    return _share_of(record, records, ("copies alone",))


def _share_of(record: Record, records: Sequence[Record], bounds: Sequence[str]) -> float | None:
    """None where one of them was not timed, or by another clock."""
    if record.rung.endswith("alone") or record.median_us is None:
        return None
    same = [r for r in records if (r.dtype, r.batch, r.timing) == (record.dtype, record.batch, record.timing)]
    found = [r.time for r in same if r.rung in bounds and r.median_us is not None]
    return max(found) / record.median_us if len(found) == len(bounds) else None


def _right_answers(records: Sequence[Record]) -> Table:
    columns: list[Column] = [
        ("dtype", lambda r: r.dtype),
        ("images", lambda r: f"{r.batch:,}"),
        ("right answers", lambda r: "" if r.accuracy is None else f"{r.accuracy:.4f}"),
        ("in float64", lambda r: r.note.removeprefix("float64: ")),
        ("error at the logits", lambda r: cells.error(r.error)),
        ("allowed", lambda r: cells.error(r.tolerance)),
    ]
    title = f"{records[0].workload.removesuffix('_accuracy')}: Fashion-MNIST, the first test images"
    return _table(title, ("dtype",), columns, records)


def _accuracy(records: Sequence[Record]) -> Table:
    columns: list[Column] = [
        ("dtype", lambda r: r.dtype),
        ("answers", lambda r: r.note),
        ("error", lambda r: cells.error(r.error)),
        ("allowed", lambda r: cells.error(r.tolerance)),
    ]
    title = f"{records[0].workload.removesuffix('_accuracy')}: against float64 on the CPU"
    table = _table(title, ("dtype", "answers"), columns, records)
    table.columns[1].no_wrap = False
    return table
