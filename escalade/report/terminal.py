"""Records and outcomes as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from escalade.fitted import Table
from escalade.measure.ceilings import Ceilings
from escalade.measure.records import Record
from escalade.measure.verification import Outcome
from escalade.ops.base.operation import Operation
from escalade.report import cells


def ceilings_line(ceilings: Ceilings) -> str:
    products = ", ".join(f"{dtype} {rate:.1f}" for dtype, rate in ceilings.tflops.items())
    return (
        f"{ceilings.gpu}: {ceilings.multiprocessors} SMs, {ceilings.l2_bytes / 2**20:.0f} MiB L2, "
        f"{ceilings.shared_bytes / 2**10:.0f} KiB shared memory a block; "
        f"copy {ceilings.copy_gbps:.0f} GB/s, sum {ceilings.read_gbps:.0f}; the best of several matrix products in "
        f"TFLOP/s: {products}"
    )


def conditions_line(conditions: Iterable[Mapping[str, Any]]) -> str:
    """What the card was like in several measurements, and why it held its clock down; nothing if nobody could say."""
    seen = [each for each in conditions if each]

    def between(name: str, unit: str) -> list[str]:
        found = sorted(each[name] for each in seen if each.get(name) is not None)
        span = [f"{value:.0f}" for value in dict.fromkeys((*found[:1], *found[-1:]))]
        return [f"{' to '.join(span)} {unit}"] if found else []

    if not seen:
        return ""
    figures = [*between("sm_mhz", "MHz"), *between("power_w", "W"), *between("temperature_c", "°C")]
    held = [each["throttled"] for each in seen if each.get("throttled")]
    reasons = ", ".join(dict.fromkeys(held))
    slower = f"; {len(held)} of {len(seen)} times ({cells.THROTTLED}) with the clock held down by {reasons}"
    return f"The card meanwhile: {', '.join(figures)}" + (slower if held else "")


def ladder_tables(records: Sequence[Record], width: int) -> Iterable[Table]:
    """One table for each workload and problem: the peers, then the rungs, dtype by dtype."""
    for workload, problem in dict.fromkeys((record.workload, record.problem) for record in records):
        chosen = [r for r in records if (r.workload, r.problem) == (workload, problem)]
        on_twin = any(record.timing == "twin" for record in chosen)
        yield _twin_table(chosen) if on_twin else _ladder_table(chosen, width)


Cell = Callable[[Record], str]
_COLUMNS: dict[str, Cell] = {
    "µs": cells.microseconds,
    "GFLOP/s": cells.gflops,
    "% ceiling": lambda r: cells.percent(r.peak_pct),
    "gain": lambda r: cells.times(r.gain),
    "predicted": lambda r: cells.times(r.predicted_gain),
    "vs PyTorch": lambda r: cells.times(r.peer_gain),
    "error": lambda r: cells.error(r.error),
}
_MORE_COLUMNS: dict[str, Cell] = {
    "GB/s": lambda r: cells.whole(r.gbps),
    "× floor": cells.over_floor,
    "regs": lambda r: cells.integer(r.registers),
    "occupancy": lambda r: cells.share(r.occupancy),
    "config": cells.config,
}
_WIDE = 180
"""Characters that a terminal needs for all columns; a narrower one gets the first few, whole."""


def _ladder_table(records: Sequence[Record], width: int) -> Table:
    columns = _COLUMNS | (_MORE_COLUMNS if width >= _WIDE else {})
    table = Table(title=escape(f"{records[0].workload} {records[0].problem}"), title_justify="left")
    for heading in ("dtype", "rung", "layout"):
        table.add_column(heading, no_wrap=True)
    for heading in columns:
        table.add_column(
            heading, justify="left" if heading == "config" else "right", no_wrap=heading != "config"
        )
    for record in records:
        shown = [cell(record) for cell in columns.values()]
        if record.failure:
            shown = [escape(cells.reason(record)) if record.is_peer else "[red]failed[/]"]
        table.add_row(record.dtype, cells.who(record), record.layout, *shown)
    return table


def _twin_table(records: Sequence[Record]) -> Table:
    table = Table(
        title=escape(f"{records[0].workload} {records[0].problem}, on the twin"), title_justify="left"
    )
    for heading in ("dtype", "rung", "layout", "result"):
        table.add_column(heading, no_wrap=heading != "rung", overflow="fold")
    table.add_column("error", justify="right")
    table.add_column("seconds on CPU", justify="right")
    for record in records:
        result = "[red]failed[/]" if record.failure else "[green]right[/]"
        seconds = f"{record.median_us / 1e6:.3f}" if record.median_us is not None else ""
        table.add_row(
            record.dtype, cells.who(record), record.layout, result, cells.error(record.error), seconds
        )
    return table


def failure(record: Record) -> str:
    """The one that failed, and the first line of why."""
    return f"{cells.who(record)} {record.dtype} {record.layout}: {record.failure.splitlines()[0]}"


def remark(record: Record) -> str:
    return f"{cells.who(record)} {record.dtype} {record.layout}: {record.note.splitlines()[0]}"


def verify_table(operation: Operation[Any], outcomes: Sequence[Outcome]) -> Table:
    """One row a rung: how many problems were right, wrong or not taken, and how close to the tolerance it came."""
    table = Table(title=operation.name, title_justify="left")
    table.add_column("rung")
    for heading in ("right", "wrong", "not taken", "largest error/tolerance", "seconds"):
        table.add_column(heading, justify="right")
    for rung in dict.fromkeys(outcome.rung for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.rung == rung]
        wrong = sum(outcome.failed for outcome in own)
        closeness = [o.error / o.tolerance for o in own if o.error is not None and o.tolerance and o.passed]
        table.add_row(
            rung,
            str(sum(outcome.passed for outcome in own)),
            f"[red]{wrong}[/]" if wrong else "0",
            str(sum(bool(outcome.refusal) for outcome in own)),
            f"{max(closeness):.2f}" if closeness else "",
            f"{sum(outcome.seconds for outcome in own):.1f}",
        )
    return table
