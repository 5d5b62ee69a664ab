"""Profiles: parts, their kernels with counters or times, floors, and the bottleneck of each kernel in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from escalade.device.nvml import ConditionMonitor
from escalade.device.run import TwinOptions
from escalade.device.twin import Counts
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record
from escalade_bench.profile.counters import Counters
from escalade_bench.profile.target import Part, Work, merged, owners

BUSY_PCT = 60.0
"""Percent of its peak from which a unit is the bottleneck."""
TOO_MUCH = 1.2
"""Multiple of the fewest bytes from which traffic is reported."""
WIDEST_REQUEST = 16.0
"""Sectors per request of a warp with contiguous loads of 16 bytes per thread; more are scattered."""
CONFLICTS_PCT = 10.0
FEW_WARPS_PCT = 25.0
_CONFLICTS = "{:.0f}% of shared-memory wavefronts are bank conflicts"
_UNITS = {
    "dram_pct": "is memory bound: {:.0f}% of the peak bandwidth",
    "tensor_pct": "is bound by tensor cores: active in {:.0f}% of all cycles",
    "issue_pct": "is issue bound: instructions in {:.0f}% of all cycles",
}
_WAITS = {
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory or special functions",
    "barrier": "other warps at a barrier",
    "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of global memory",
    "math_pipe_throttle": "busy arithmetic units",
    "gmma": "tensor cores",
    "wait": "the latency of its own instructions",
    "no_instruction": "instructions to be fetched",
    "imc_miss": "constants to be fetched",
}
"""Meaning of stall reasons; others are reported by name."""


def diagnose(part: Part, kernels: Sequence[Counters], floor_us: float | None) -> str:
    """Return one line on a part; the longest of its kernels gives the bottleneck."""
    times = [one.us for one in kernels if one.us is not None]
    if not times:
        return ""
    longest = max(kernels, key=lambda one: one.us or 0.0)
    found = [_bottleneck(longest)]
    moved = [one.dram_bytes for one in kernels if one.dram_bytes is not None]
    if part.bytes and len(moved) == len(kernels) and sum(moved) >= TOO_MUCH * part.bytes:
        found.append(f"moves {sum(moved) / part.bytes:.1f}x the compulsory bytes")
    if floor_us:
        found.append(f"takes {sum(times) / floor_us:.1f}x its floor")
    found.append(_scattered({"load": longest.load_sectors, "store": longest.store_sectors}, " and "))
    if (longest.conflicts_pct or 0.0) >= CONFLICTS_PCT:
        found.append(_CONFLICTS.format(longest.conflicts_pct))
    return "; ".join(filter(None, (*found, _few_warps(longest))))


def _bottleneck(one: Counters) -> str:
    shares = {text: getattr(one, name) or 0.0 for name, text in _UNITS.items()}
    busiest = max(shares, key=lambda text: shares[text])
    if shares[busiest] >= BUSY_PCT:
        return busiest.format(shares[busiest])
    if not one.stalls:
        return ""
    reason, share = next(iter(one.stalls.items()))
    name = reason.replace("_", " ")
    return f"waits on {_WAITS.get(reason, name)}: {100 * share:.0f}% of stalls are {name}"


def _scattered(sectors: dict[str, float | None], joint: str) -> str:
    wide = {kind: count for kind, count in sectors.items() if count and count > WIDEST_REQUEST}
    return joint.join(f"a {kind} touches {count:.0f} sectors" for kind, count in wide.items())


def _few_warps(one: Counters) -> str:
    """Report a low occupancy, which matters unless tensor cores or memory are busy."""
    if one.occupancy_pct is None or one.occupancy_pct >= FEW_WARPS_PCT:
        return ""
    if max(one.tensor_pct or 0.0, one.dram_pct or 0.0) >= BUSY_PCT:
        return ""
    takes = [f"{one.registers} registers per thread"] if one.registers else []
    takes += [f"{one.shared_bytes / 1024:.0f} KiB of shared memory per CTA"] if one.shared_bytes else []
    return f"occupancy is {one.occupancy_pct:.0f}%" + (f", with {' and '.join(takes)}" if takes else "")


def diagnose_counts(counts: Counts) -> str:
    """Return one line on the twin's counts: repeated reads, scattered requests, bank conflicts."""
    found = []
    if counts.unique_read_bytes:
        times = counts.read_bytes / counts.unique_read_bytes
        found.append(f"requests each byte {times:.1f} times")
    found.append(
        _scattered({kind: counts.of("global", kind).per_request for kind in ("load", "store")}, "; ")
    )
    turns = sum(line.transactions for line in counts.lines if line.memory == "shared")
    if turns and 100 * counts.conflicts / turns >= CONFLICTS_PCT:
        found.append(_CONFLICTS.format(100 * counts.conflicts / turns))
    return "; ".join(filter(None, found))


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


def counted(work: Work, seed: int) -> Profiled:
    """Run a part once on the twin and count it. The counts do not depend on the values of its inputs."""
    call = work.bind(torch.device("cpu"), seed, TwinOptions(counts=True))
    call()
    counts = call.counts()
    return Profiled(work.part, [Counters("", counts=counts.figures())], None, diagnose_counts(counts))


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

    def records(self) -> list[Record]:
        """Return the twin's counts for the report's tables, one row per part."""
        return [
            Record(
                "profile_counts", self.title, one.part.dtype, "", 0, "escalade", one.part.name, timing="twin",
                counts=one.kernels[0].counts,
            )
            for one in self.parts
        ]  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


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
