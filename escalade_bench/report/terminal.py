"""Terminal output: ladders, verification, and counts by the twin or a profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from escalade.ops.base.operation import Operation
from escalade.tune.verification import Outcome
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record
from escalade_bench.profile.counters import COLUMNS as COUNTERS
from escalade_bench.profile.profiles import Profile, Profiled
from escalade_bench.report import cells
from escalade_bench.report.compare import grouped
from escalade_bench.report.pages import ladders
from escalade_bench.report.table import Column, Table, columns, items, text


def ceilings_line(ceilings: Ceilings) -> str:
    products = ", ".join(f"{dtype} {rate:.1f}" for dtype, rate in ceilings.tflops.items())
    return (
        f"{ceilings.gpu}: {ceilings.multiprocessors} SMs, {ceilings.l2_bytes / 2**20:.0f} MiB L2, "
        f"{ceilings.shared_bytes / 2**10:.0f} KiB shared memory per block; copy {ceilings.copy_gbps:.0f} GB/s, sum "
        f"{ceilings.read_gbps:.0f}; the best of several matrix products in TFLOP/s: {products}"
    )


def conditions_line(conditions: Iterable[Mapping[str, Any]]) -> str:
    """Describe the card's state during measurements, and why it throttled; empty if unknown."""
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


def ladder_tables(records: Sequence[Record]) -> Iterator[Table]:
    """One table per workload and problem: the peers, then the rungs, dtype by dtype."""
    for (workload, problem), own in grouped(records, lambda r: (r.workload, r.problem)).items():
        on_twin = any(record.timing == "twin" for record in own)
        made = _twin_table(own) if on_twin else ladders.problem_table(own)
        yield made.titled(f"{workload} {problem}" + (", on the twin" if on_twin else ""))


def _twin_table(records: Sequence[Record]) -> Table:
    seconds = Column("seconds on CPU", lambda r: cells.written("{:.3f}", r.median_us and r.median_us / 1e6))
    return Table([*columns("dtype|rung|layout|result|error"), seconds], records)


def failure(record: Record) -> str:
    """Describe a failed record, with the first line of the reason."""
    who = (record.problem, cells.who(record), record.dtype, record.layout)
    return f"{' '.join(filter(None, who))}: {cells.first_line(record.failure)}"


def remark(record: Record) -> str:
    return f"{cells.who(record)} {record.dtype} {record.layout}: {cells.first_line(record.note)}"


def verify_table(operation: Operation[Any], outcomes: Sequence[Outcome]) -> Table:
    """Return one row per rung: counts of correct, incorrect and unsupported problems, and the largest
    error/tolerance."""

    rows = []
    for rung, own in grouped(outcomes, lambda outcome: outcome.rung).items():
        counts = (sum(bool(getattr(one, name)) for one in own) for name in ("passed", "failed", "refusal"))
        close = [o.error / o.tolerance for o in own if o.error is not None and o.tolerance and o.passed]
        seconds = sum(outcome.seconds for outcome in own)
        rows.append((rung, *counts, cells.written("{:.2f}", max(close, default=None)), f"{seconds:.1f}"))
    heads = ("rung", ">right", ">wrong", ">not taken", ">largest error/tolerance", ">seconds")
    return Table(items(*heads), rows, None, operation.name)


def profile_table(found: Profile) -> Table:
    """Return one row per kernel; a part is named in the row of its first kernel."""
    rows = [(each, number, one) for each in found.parts for number, one in enumerate(each.kernels)]

    def of_part(heading: str, cell: Callable[[Profiled], str]) -> Column:
        return Column(heading, lambda row: "" if row[1] else cell(row[0]), left=heading != "floor µs")

    def counted(field: str, heading: str, digits: int, unit: float) -> Column:
        def cell(row: Any) -> str:
            value = getattr(row[2], field)
            return "" if value is None else f"{value / unit:,.{digits}f}"

        return Column(heading, cell)

    shown = [
        of_part("part", lambda each: each.part.name),
        of_part("rung", lambda each: each.part.rung),
        text("kernel", lambda row: row[2].kernel[:60]),
        of_part("floor µs", lambda each: cells.written("{:.2f}", each.floor_us)),
        *(counted(field, *column) for field, column in COUNTERS.items()),
    ]
    return Table(shown, rows, None, f"{found.title}: {found.how}")


COUNTS = "_counts"
"""Suffix of the workloads whose records are counts, after the operation's name."""
_UNITS = ("", "k", "M", "G", "T")


def count_tables(records: Sequence[Record]) -> Iterator[Table]:
    """One table for each workload, problem and counter."""
    counted = [record for record in records if record.counts]
    for (workload, problem, how), own in grouped(
        counted, lambda r: (r.workload, r.problem, r.timing)
    ).items():
        by = "by Nsight Compute" if how == "ncu" else "on the twin"
        title = f"{workload.removesuffix(COUNTS)} {problem}, counted {by}"
        yield Table([*columns("rung|dtype|layout"), *_COLUMNS], own, title=title)


def short(count: int) -> str:
    """Format to about three digits: `734`, `12.3k`, `4.06M`."""
    power = max(0, min(len(_UNITS) - 1, (len(str(count)) - 1) // 3))
    size = f"{count / 1000**power:.3g}"
    return (size if "e" not in size else f"{count / 1000**power:.0f}") + _UNITS[power]


def _total(record: Record, names: Sequence[str]) -> int:
    return sum(record.counts.get(name, 0) for name in names)


def _count(heading: str, *names: str) -> Column:
    return Column(heading, lambda r: short(_total(r, names)) if _total(r, names) else "")


def _each(unit: str, memory: str = "shared") -> list[str]:
    operations = ("load", "copy") if memory == "global" else ("load", "store", "copy", "atomic")
    return [f"{memory}_{operation}_{unit}" for operation in operations]


def _sectors_each(record: Record) -> str:
    requests = _total(record, _each("requests", "global"))
    return f"{_total(record, _each('sectors', 'global')) / requests:.1f}" if requests else ""


_COLUMNS = (
    _count("loads", *_each("requests", "global")),
    Column("sectors each", _sectors_each),
    _count("TMA", "bulk_loads"),
    _count("bytes read", "read_bytes"),
    _count("unique", "unique_read_bytes"),
    _count("written", "written_bytes"),
    _count("shared", *_each("requests")),
    _count("turns", *_each("turns")),
    _count("conflicts", *_each("conflicts")),
    _count("FMA", "fma"),
    _count("tensor", "tensor_multiplications"),
    _count("barriers", "barriers"),
    _count("atomics", "atomics"),
    _count("shuffles", "shuffles"),
    _count("special", "special"),
    _count("MMAs", "tensor_instructions"),
)
