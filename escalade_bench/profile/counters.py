"""Counters of one kernel launch: the metrics of Nsight Compute, and the figures computed from them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from escalade.errors import EscaladeError
from escalade.narrow_tables import Table

_STALL, _ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
STALLS = f"regex:^{_STALL}[a-z_]*{_ISSUE.replace('.', '[.]')}$"
"""All stall reasons of the architecture."""
NO_STALL = ("selected", "not_selected")
"""States of a warp that is ready to issue."""
_GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_TURNS = "l1tex__data_pipe_lsu_wavefronts_mem_shared{}.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared{}.sum"
COUNTS = {
    **{
        f"global_{count}_{unit}": _GLOBAL.format(unit, operation)
        for count, operation in (("load", "ld"), ("store", "st"), ("copy", "ldgsts"))
        for unit in ("requests", "sectors")
    },
    "shared_load_requests": "smsp__inst_executed_op_shared_ld.sum + smsp__inst_executed_op_ldsm.sum",
    "shared_store_requests": "smsp__inst_executed_op_shared_st.sum",
    **{
        f"shared_{count}_{unit}": metric.format(f"_op_{operation}")
        for count, operation in (("load", "ld"), ("store", "st"))
        for unit, metric in (("turns", _TURNS), ("conflicts", _CONFLICTS))
    },
    "fma": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
}
"""Metrics that the twin counts too, by the twin's names."""
_SCALES = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
}  # fmt: skip
"""Bytes or microseconds per unit; other units are counts, ratios or percentages."""


def _figure(metric: str, heading: str = "", digits: int = 0, unit: float = 1.0) -> Any:
    """Return a figure by its metric: a sum, a ratio, or alternatives (`|`) where versions of ncu or architectures
    differ; with the heading of its column, digits and unit."""
    return field(default=None, metadata={"metric": metric, "column": (heading, digits, unit)})


@dataclass(frozen=True)
class Counters:
    """Figures of one kernel launch; None if not counted."""

    kernel: str
    us: float | None = _figure("gpu__time_duration.sum", "µs", 2)
    dram_read_bytes: float | None = _figure("dram__bytes_read.sum|dram__bytes_op_read.sum", "MB read", 2, 1e6)
    dram_written_bytes: float | None = _figure(
        "dram__bytes_write.sum|dram__bytes_op_write.sum", "written", 2, 1e6
    )
    dram_pct: float | None = _figure("dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory %")
    """DRAM throughput in percent of its peak."""
    l2_bytes: float | None = _figure("lts__t_bytes.sum", "by L2", 2, 1e6)
    tensor_pct: float | None = _figure(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "tensor %"
    )
    """Percent of cycles with active tensor cores."""
    issue_pct: float | None = _figure("smsp__issue_active.avg.pct_of_peak_sustained_elapsed", "issue %")
    """Percent of cycles in which schedulers issue."""
    occupancy_pct: float | None = _figure("sm__warps_active.avg.pct_of_peak_sustained_active", "warps %")
    """Active warps in percent of an SM's maximum."""
    registers: int | None = _figure("launch__registers_per_thread", "regs")
    shared_bytes: int | None = _figure(
        "launch__shared_mem_per_block_static + launch__shared_mem_per_block_dynamic"
    )
    """Shared memory per CTA."""
    load_sectors: float | None = _figure(
        f"{_GLOBAL.format('sectors', 'ld')} / {_GLOBAL.format('requests', 'ld')}", "sectors ld", 1
    )
    """Sectors of 32 bytes per global load of a warp."""
    store_sectors: float | None = _figure(
        f"{_GLOBAL.format('sectors', 'st')} / {_GLOBAL.format('requests', 'st')}", "st", 1
    )
    conflicts_pct: float | None = _figure(f"{_CONFLICTS.format('')} / {_TURNS.format('')}", "conflicts %")
    """Wavefronts of shared memory caused by bank conflicts, in percent of all."""
    stalls: dict[str, float] = field(default_factory=dict)
    """Share of all stalled warps per reason, largest first."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts that the twin has too, by its names (docs/twin.md)."""

    @property
    def dram_bytes(self) -> float | None:
        if self.dram_read_bytes is None:
            return None
        return self.dram_read_bytes + (self.dram_written_bytes or 0.0)


METRICS: dict[str, str] = {one.name: one.metadata["metric"] for one in fields(Counters) if one.metadata}
"""The expression of metrics of each figure."""
COLUMNS: dict[str, tuple[str, int, float]] = {
    one.name: column for one in fields(Counters) if one.metadata and (column := one.metadata["column"])[0]
}
"""Heading, digits and unit of the figures that a table shows."""


def names(expression: str) -> list[tuple[str, ...]]:
    """Return the metrics of an expression, each with its alternatives."""
    return [tuple(term.split("|")) for term in re.split(r" [+/] ", expression)]


def _value(expression: str, metrics: Mapping[str, float]) -> float | None:
    """Compute an expression; return None if a metric is missing or the divisor is zero."""
    values = [next((metrics[one] for one in each if one in metrics), None) for each in names(expression)]
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return None
    if " / " not in expression:
        return sum(found)
    return found[0] / found[1] if found[1] else None


def counters_of(kernel: str, metrics: Mapping[str, float]) -> Counters:
    """Compute the figures of a launch from its metrics, in bytes and microseconds."""
    figures: dict[str, Any] = {name: _value(expression, metrics) for name, expression in METRICS.items()}
    for name in ("registers", "shared_bytes"):
        figures[name] = None if figures[name] is None else round(figures[name])
    if figures["conflicts_pct"] is not None:
        figures["conflicts_pct"] *= 100
    counts = {name: _value(expression, metrics) for name, expression in COUNTS.items()}
    known = {name: round(value) for name, value in counts.items() if value is not None}
    return Counters(kernel, **figures, stalls=_stalls(metrics), counts=known)


def _stalls(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {
        name.removeprefix(_STALL).removesuffix(_ISSUE): value
        for name, value in metrics.items()
        if name.startswith(_STALL) and name.endswith(_ISSUE) and "_not_issued" not in name and value > 0
    }
    waiting = {reason: value for reason, value in found.items() if reason not in NO_STALL}
    total = sum(waiting.values())
    return {reason: value / total for reason, value in sorted(waiting.items(), key=lambda pair: -pair[1])}


def parse(text: str) -> list[Counters]:
    """Read the table of `ncu --csv --page raw`: one row per launch, one column per metric, a row of units first."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise EscaladeError("ncu wrote no table of metrics")
    header, *rows = (row for row in csv.reader(lines[start:]) if len(row) > 1)  # skips ncu's messages
    units = rows.pop(0) if rows and not rows[0][0] else [""] * len(header)
    found = []
    for row in rows:
        metrics = {}
        for name, cell, unit in zip(header, row, units, strict=False):
            try:
                metrics[name] = float(cell.replace(",", "")) * _SCALES.get(unit.split("/")[0], 1.0)
            except ValueError:
                continue  # names, and metrics that are n/a
        found.append(counters_of(row[header.index("Kernel Name")], metrics))
    return found


# The twin beside ncu

CLOSE = 0.05
"""Largest relative difference of two counts that agree."""


def summed(kernels: Sequence[Counters]) -> dict[str, int]:
    """Add up the counts that every launch has."""
    known = (name for name in COUNTS if kernels and all(name in one.counts for one in kernels))
    return {name: sum(one.counts[name] for one in kernels) for name in known}


def differences(card: Mapping[str, int], twin: Mapping[str, int]) -> dict[str, float]:
    """Return the difference of each count, relative to the larger one. The twin leaves out counts of zero."""
    pairs = ((name, count, twin.get(name, 0)) for name, count in card.items())
    return {name: abs(ours - theirs) / max(ours, theirs) for name, ours, theirs in pairs if ours or theirs}


def agreement(found: Mapping[str, float]) -> str:
    close = sum(difference <= CLOSE for difference in found.values())
    return f"{close} of {len(found)} counts agree within {100 * CLOSE:.0f}%."


def agreement_table(card: Mapping[str, int], twin: Mapping[str, int]) -> Table:
    shown = Table(title="Counted by ncu and on the twin", title_justify="left")
    for heading in ("count", "ncu", "twin", "off by"):
        shown.add_column(heading, justify="left" if heading == "count" else "right")
    for name, difference in differences(card, twin).items():
        off = f"{100 * difference:.1f}%" if difference <= CLOSE else f"[yellow]{100 * difference:.1f}%[/]"
        shown.add_row(name, f"{card[name]:,}", f"{twin.get(name, 0):,}", off)
    return shown
