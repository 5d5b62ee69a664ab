"""Profiles without a GPU: the twin counts each part, alone or compared with the counters of a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Counts
from escalade.narrow_tables import Table
from escalade_bench.measure.records import Record
from escalade_bench.profile.counters import COUNTS, Counters
from escalade_bench.profile.profiles import Profiled, diagnose_counts
from escalade_bench.profile.target import Work

CLOSE = 0.05
"""Largest relative difference of two counts that agree."""


def count(work: Work, seed: int) -> Counts:
    """Run a part once on the twin. The counts do not depend on the values of its inputs."""
    call = work.bind(torch.device("cpu"), seed, TwinOptions(counts=True))
    call()
    return call.counts()


def counted(work: Work, seed: int) -> Profiled:
    counts = count(work, seed)
    return Profiled(work.part, [Counters("", counts=counts.figures())], None, diagnose_counts(counts))


def records(title: str, parts: Sequence[Profiled]) -> list[Record]:
    """Convert counts for the report's tables, one row per part."""
    return [
        Record(
            "profile_counts", title, each.part.dtype, "", 0, "escalade", each.part.name, timing="twin",
            counts=each.kernels[0].counts,
        )
        for each in parts
    ]  # fmt: skip


def summed(kernels: Sequence[Counters]) -> dict[str, int]:
    """Add up the counts that every launch has."""
    known = (name for name in COUNTS if kernels and all(name in one.counts for one in kernels))
    return {name: sum(one.counts[name] for one in kernels) for name in known}


def differences(card: Mapping[str, int], twin: Mapping[str, int]) -> dict[str, float]:
    """Return the difference of each count, relative to the larger one. The twin leaves out counts of zero."""
    pairs = {name: (count, twin.get(name, 0)) for name, count in card.items()}
    return {
        name: abs(ours - theirs) / max(ours, theirs)
        for name, (ours, theirs) in pairs.items()
        if ours or theirs
    }


def agreement(found: Mapping[str, float]) -> str:
    close = sum(difference <= CLOSE for difference in found.values())
    return f"{close} of {len(found)} counts agree within {100 * CLOSE:.0f}%."


def agreement_table(card: Mapping[str, int], twin: Mapping[str, int]) -> Table:
    shown = Table(title="Counted by ncu and on the twin", title_justify="left")
    for heading in ("count", "ncu", "twin", "off by"):
        shown.add_column(heading, justify="left" if heading == "count" else "right")
    for name, difference in differences(card, twin).items():
        off = f"{100 * difference:.1f}%"
        shown.add_row(
            name,
            f"{card[name]:,}",
            f"{twin.get(name, 0):,}",
            off if difference <= CLOSE else f"[yellow]{off}[/]",
        )
    return shown
