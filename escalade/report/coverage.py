"""Many networks on a terminal: a line for each as it is measured, then tables and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.markup import escape

from escalade.bench.peers.comparison import by_clock, on_device
from escalade.fitted import Table
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.coverage_rows import Row, parts


def lines(records: Sequence[Record]) -> Iterator[str]:
    """What came of a network, in a line for each dtype and batch."""
    for part in parts(records):
        for row in part.rows:
            yield f"{row.network} {part.dtype} b{part.batch}: {'; '.join(_facts(row))}"


def _facts(row: Row) -> Iterator[str]:
    yield row.verdict
    if row.fallbacks is not None:
        yield f"in PyTorch {row.fallback_count}, {row.ours.config['launches']} launches"
    for record in row.records:
        if record.median_us is not None:
            yield f"{record.system} {cells.figure(record.median_us)} µs, a call {cells.figure(record.wall_us)}"
        elif record.is_peer:
            yield f"{record.system}: {cells.reason(record)}"
    ratios = [row.over_best(clock).ratio for clock in (on_device, by_clock)]
    if any(ratios):
        yield f"{' and '.join(filter(None, map(cells.times, ratios)))} the best peer's speed"


_FIGURES = (
    "launches",
    "µs",
    "graph's",
    "compile's",
    "vs best",
    "µs a call",
    "vs best",
    "% of a copy",
)


def coverage_tables(records: Sequence[Record]) -> Iterable[Table]:
    """One for each dtype and batch."""
    for part in parts(records):
        table = Table(title=escape(part.title), title_justify="left")
        table.add_column("network", no_wrap=True)
        table.add_column("error of allowed")
        table.add_column("in PyTorch")
        figures = [_figures(row) for row in part.rows]
        shown = [column for column in range(len(_FIGURES)) if any(row[column] for row in figures)]
        for column in shown:
            table.add_column(_FIGURES[column], justify="right")
        for row, found in zip(part.rows, figures, strict=True):
            texts = (row.network, row.verdict, row.fallback_count)
            table.add_row(*map(escape, (*texts, *(found[column] for column in shown))))
        yield table


def _figures(row: Row) -> tuple[str, ...]:
    return (
        cells.integer(row.ours.config.get("launches")),
        cells.figure(on_device(row.ours)),
        cells.time_or_reason(row.graph(), on_device),
        cells.time_or_reason(row.compiled(on_device), on_device),
        cells.times(row.over_best(on_device).ratio),
        cells.figure(by_clock(row.ours)),
        cells.times(row.over_best(by_clock).ratio),
        cells.percent(row.ours.copy_pct),
    )


def summaries(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each dtype and batch."""
    for part in parts(records):
        yield f"{part.title}: {part.summary()}"
