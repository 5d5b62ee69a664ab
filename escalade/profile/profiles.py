"""A profile to read: parts, their kernels with counters or times, floors, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from escalade.device.nvml import Watch
from escalade.fitted import Table
from escalade.measure.ceilings import Ceilings
from escalade.profile.counters import Counters, counters_of
from escalade.profile.parts import Part, shared_out, together
from escalade.profile.readings import Reading
from escalade.profile.words import said

_MEGA = 1e6
Cell = Callable[[Counters], str]


@dataclass(frozen=True)
class Profiled:
    """A part and what its kernels did."""

    part: Part
    kernels: list[Counters]
    floor_us: float | None
    words: str

    @property
    def us(self) -> float:
        return sum(one.us or 0.0 for one in self.kernels)


@dataclass(frozen=True)
class Profile:
    """What a target did, part by part."""

    title: str
    how: str
    """Where the figures come from."""
    parts: list[Profiled]
    conditions: dict[str, Any]
    """What the card was like: see `escalade.device.nvml.Conditions`."""

    @property
    def us(self) -> float:
        return sum(part.us for part in self.parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """One row a kernel; columns of which nothing is known are left out."""
        kernels = [one for each in self.parts for one in each.kernels]
        columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(one) for one in kernels)}
        table = Table(title=escape(f"{self.title}: {self.how}"), title_justify="left")
        for name in ("part", "rung", "kernel"):
            table.add_column(name, overflow="fold")
        for name in ("floor µs", *columns):
            table.add_column(name, justify="right", no_wrap=True)
        for each in self.parts:
            floor = "" if each.floor_us is None else f"{each.floor_us:.2f}"
            names = [each.part.name, each.part.rung, floor]
            for one in each.kernels:
                part, rung, floor = names
                table.add_row(
                    escape(part),
                    rung,
                    escape(one.kernel[:60]),
                    floor,
                    *(cell(one) for cell in columns.values()),
                )
                names = ["", "", ""]
        return table


def counted(title: str, parts: Sequence[Part], readings: Sequence[Reading], ceilings: Ceilings) -> Profile:
    """The profile of what Nsight Compute counted."""
    parts = together(parts)
    found: list[list[Counters]] = [[] for _ in parts]
    owners = shared_out(parts, [reading.kernel for reading in readings])
    for owner, reading in zip(owners, readings, strict=True):
        found[owner].append(counters_of(reading))
    return profile(title, "counters by ncu, caches empty before each kernel", parts, found, ceilings)


def profile(
    title: str, how: str, parts: Sequence[Part], kernels: Sequence[list[Counters]], ceilings: Ceilings
) -> Profile:
    """Parts and their kernels, with floors and words; right behind it the card is as it was."""
    watch = Watch()
    watch.look()
    profiled = []
    for part, own in zip(parts, kernels, strict=True):
        if part.kernels is None and not own:
            continue
        rate = part.dtype if part.dtype in ceilings.tflops else "fp32"  # of what multiplies nothing
        floor = ceilings.floor_us(part.flops, part.bytes, rate) if part.bytes else None
        profiled.append(Profiled(part, own, floor, said(part, own, floor)))
    return Profile(title, how, profiled, watch.seen)


def _figure(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "" if value is None else f"{value / scale:,.{digits}f}"


_COLUMNS: dict[str, Cell] = {
    "µs": lambda one: _figure(one.us, 2),
    "MB read": lambda one: _figure(one.dram_read_bytes, 2, _MEGA),
    "written": lambda one: _figure(one.dram_written_bytes, 2, _MEGA),
    "by L2": lambda one: _figure(one.l2_bytes, 2, _MEGA),
    "memory %": lambda one: _figure(one.dram_pct),
    "tensor %": lambda one: _figure(one.tensor_pct),
    "issue %": lambda one: _figure(one.issue_pct),
    "warps %": lambda one: _figure(one.occupancy_pct),
    "regs": lambda one: _figure(one.registers),
    "sectors ld": lambda one: _figure(one.load_sectors, 1),
    "st": lambda one: _figure(one.store_sectors, 1),
    "conflicts %": lambda one: _figure(one.conflicts_pct),
}
