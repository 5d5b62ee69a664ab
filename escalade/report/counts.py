"""What the twin counted, as tables: how each rung differs from the ones before it, in requests and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.markup import escape

from escalade.fitted import Table
from escalade.measure.records import Record
from escalade.report.markdown import table

Cell = Callable[[Mapping[str, int]], str]
SUFFIX = "_counts"
"""How the workloads end whose records are counts, behind the operation's name."""
_UNITS = ("", "k", "M", "G", "T")


def terminal_tables(records: Sequence[Record], width: int) -> Iterable[Table]:
    """One table for each workload and problem."""
    for workload, problem in dict.fromkeys((record.workload, record.problem) for record in records):
        chosen = [r for r in records if (r.workload, r.problem) == (workload, problem) and r.counts]
        if chosen:
            title = f"{workload.removesuffix(SUFFIX)} {problem}, counted on the twin"
            yield _table(escape(title), chosen, width)


def page_table(records: Sequence[Record]) -> str:
    """Counts as Markdown, with all columns in which somebody has a figure."""
    columns = {"rung": [r.rung for r in records], "dtype": [r.dtype for r in records]}
    columns |= {"layout": [r.layout for r in records]} | _figures(records)
    return table(list(columns), list(zip(*columns.values(), strict=True)), left=3)


def _figures(records: Sequence[Record]) -> dict[str, list[str]]:
    return {heading: [cell(r.counts) for r in records] for heading, cell in _COLUMNS.items()}


def short(count: int) -> str:
    """Three digits or so: `734`, `12.3k`, `4.06M`."""
    power = max(0, min(len(_UNITS) - 1, (len(str(count)) - 1) // 3))
    size = f"{count / 1000**power:.3g}"
    return (size if "e" not in size else f"{count / 1000**power:.0f}") + _UNITS[power]


def _count(*names: str) -> Cell:
    def cell(counts: Mapping[str, int]) -> str:
        total = sum(counts.get(name, 0) for name in names)
        return short(total) if total else ""

    return cell


def _ratio(above: Sequence[str], below: Sequence[str]) -> Cell:
    def cell(counts: Mapping[str, int]) -> str:
        requests = sum(counts.get(name, 0) for name in below)
        return f"{sum(counts.get(name, 0) for name in above) / requests:.1f}" if requests else ""

    return cell


def _each(unit: str, memory: str, *operations: str) -> list[str]:
    return [f"{memory}_{operation}_{unit}" for operation in operations]


_READS, _SHARED = ("load", "copy"), ("load", "store", "copy", "atomic")
_COLUMNS: dict[str, Cell] = {
    "loads": _count(*_each("requests", "global", *_READS)),
    "sectors each": _ratio(_each("sectors", "global", *_READS), _each("requests", "global", *_READS)),
    "TMA": _count("bulk_loads"),
    "bytes read": _count("read_bytes"),
    "unique": _count("unique_read_bytes"),
    "written": _count("written_bytes"),
    "shared": _count(*_each("requests", "shared", *_SHARED)),
    "turns": _count(*_each("turns", "shared", *_SHARED)),
    "conflicts": _count(*_each("conflicts", "shared", *_SHARED)),
    "FMA": _count("fma"),
    "tensor": _count("tensor_multiplications"),
    "barriers": _count("barriers"),
    "atomics": _count("atomics"),
    "shuffles": _count("shuffles"),
    "special": _count("special"),
    "MMAs": _count("tensor_instructions"),
}
"""Columns in the order in which a narrow terminal has room for them."""


def _table(title: str, records: Sequence[Record], width: int) -> Table:
    """Columns in which nobody has a figure are left out, and those that the terminal has no room for."""
    made = Table(title=title, title_justify="left")
    names = {"rung": [r.rung for r in records], "dtype": [r.dtype for r in records]}
    if len({record.layout for record in records}) > 1:
        names["layout"] = [record.layout for record in records]
    shown: list[list[str]] = []
    room = width - 1
    for heading, texts in (names | _figures(records)).items():
        taken = 3 + max(map(len, (heading, *texts)))
        if not any(texts):
            continue
        room -= taken
        if room < 0 and heading not in names:
            break
        made.add_column(heading, justify="left" if heading in names else "right", no_wrap=True)
        shown.append(texts)
    for row in zip(*shown, strict=True):
        made.add_row(*row)
    return made
