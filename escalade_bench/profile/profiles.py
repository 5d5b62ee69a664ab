"""Profiles: parts, their kernels with counters or times, floors and diagnosis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from escalade.device.nvml import ConditionMonitor
from escalade.narrow_tables import Table
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.profile.counters import Counters
from escalade_bench.profile.diagnosis import diagnose
from escalade_bench.profile.target import Part, merged, owners

_COLUMNS = {
    "µs": ("us", 2, 1.0),
    "MB read": ("dram_read_bytes", 2, 1e6),
    "written": ("dram_written_bytes", 2, 1e6),
    "by L2": ("l2_bytes", 2, 1e6),
    "memory %": ("dram_pct", 0, 1.0),
    "tensor %": ("tensor_pct", 0, 1.0),
    "issue %": ("issue_pct", 0, 1.0),
    "warps %": ("occupancy_pct", 0, 1.0),
    "regs": ("registers", 0, 1.0),
    "sectors ld": ("load_sectors", 1, 1.0),
    "st": ("store_sectors", 1, 1.0),
    "conflicts %": ("conflicts_pct", 0, 1.0),
}
"""Counter, digits and unit of each column."""


@dataclass(frozen=True)
class Profiled:
    """A part and the counters of its kernels."""

    part: Part
    kernels: list[Counters]
    floor_us: float | None
    words: str

    @property
    def us(self) -> float:
        return sum(one.us or 0.0 for one in self.kernels)


@dataclass(frozen=True)
class Profile:
    """The profile of a target, part by part."""

    title: str
    how: str
    """Source of the figures."""
    parts: list[Profiled]
    conditions: dict[str, Any]
    """State of the card: see `escalade.device.nvml.GpuConditions`."""

    @property
    def us(self) -> float:
        return sum(part.us for part in self.parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """Show one row per kernel, without empty columns."""
        kernels = [one for each in self.parts for one in each.kernels]
        columns = [
            (name, *column)
            for name, column in _COLUMNS.items()
            if any(getattr(one, column[0]) is not None for one in kernels)
        ]
        table = Table(title=escape(f"{self.title}: {self.how}"), title_justify="left")
        for name in ("part", "rung", "kernel"):
            table.add_column(name, overflow="fold")
        for name in ("floor µs", *(name for name, *_ in columns)):
            table.add_column(name, justify="right", no_wrap=True)
        for each in self.parts:
            part, rung = escape(each.part.name), each.part.rung
            floor = "" if each.floor_us is None else f"{each.floor_us:.2f}"
            for one in each.kernels:
                values = [(getattr(one, field), digits, unit) for _, field, digits, unit in columns]
                cells = ["" if v is None else f"{v / unit:,.{digits}f}" for v, digits, unit in values]
                table.add_row(part, rung, escape(one.kernel[:60]), floor, *cells)
                part = rung = floor = ""
        return table


def profile(
    title: str, how: str, parts: Sequence[Part], launches: Sequence[Counters], ceilings: Ceilings
) -> Profile:
    """Assign launches to parts, and add floors and diagnosis; call it right after the measurement, for its
    conditions."""
    watch = ConditionMonitor()
    watch.sample()
    parts = merged(parts)
    kernels: list[list[Counters]] = [[] for _ in parts]
    for owner, one in zip(owners(parts, [one.kernel for one in launches]), launches, strict=True):
        kernels[owner].append(one)
    found = []
    for part, own in zip(parts, kernels, strict=True):
        if part.kernels is None and not own:
            continue
        rate = part.dtype if part.dtype in ceilings.tflops else "fp32"  # for parts without products
        floor = ceilings.floor_us(part.flops, part.bytes, rate) if part.bytes else None
        found.append(Profiled(part, own, floor, diagnose(part, own, floor)))
    return Profile(title, how, found, watch.record)
