"""Steps of training beside their peers' in docs/training-steps.md, from the records in results/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from escalade.bench.networks.workloads import WORKLOADS
from escalade.bench.peers.comparison import TRAINING_STEP, against_best, by_clock, on_device
from escalade.measure.records import Record
from escalade.report import cells, comparisons
from escalade.report.commits import newest
from escalade.report.markdown import origin
from escalade.report.rows import of_rows

PAGE = "training-steps.md"
PART = "training-step"
"""The generated part of the page, by the markers around it, and the part of `escalade bench` that measures it."""
_COMMAND = f"escalade bench autoencoder --parts {PART} --peers all --results results"
_FIGURES: comparisons.Figures = {
    "images/s": lambda r: cells.whole(r.images_per_s),
    "error": lambda r: cells.error(r.error),
}


def block(records: Sequence[Record]) -> str:
    """A section for each network whose steps were measured, all of it of one commit; without any it says so."""
    found = "\n".join(map(_section, measured(records)))
    return found or (
        f"It has not been measured yet. On a machine with a GPU: `{_COMMAND}`, then `escalade tables`.\n"
    )


def measured(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each network, of the commit that was measured last."""
    return [newest(own) for name in WORKLOADS if (own := _of(records, name))]


def _section(records: Sequence[Record]) -> str:
    network, size = records[0].workload.removesuffix(TRAINING_STEP), records[0].problem.partition("_")[0]
    inputs = f"rows of {size}" if of_rows(records) else f"{size}² images"
    return (
        f"### {network}, {inputs}, on an {records[0].gpu}\n\n{origin(records)}\n"
        f"In µs of device time:\n\n{comparisons.device_table(records, _FIGURES)}\n"
        f"In µs a call by the clock:\n\n{comparisons.call_table(records)}\n"
        f"Memory at most, in MiB:\n\n{comparisons.memory_table(records)}"
    )


def gaps(records: Sequence[Record]) -> Iterator[str]:
    """What has not been measured of steps of training."""
    absent = [name for name, one in WORKLOADS.items() if PART in one.parts and not _of(records, name)]
    for own in measured(records):
        found: dict[str, list[str]] = {}
        for one in comparisons.compared(own):
            for why in {against_best(one.records, clock).why for clock in (on_device, by_clock)} - {""}:
                found.setdefault(why, []).append(f"{one.dtype} b{one.batch}")
        reasons = "; ".join(f"{why} ({', '.join(places)})" for why, places in sorted(found.items()))
        if reasons:
            yield f"**Training steps** of {own[0].workload.removesuffix(TRAINING_STEP)}: {reasons}."
    if absent:
        yield f"**Training steps** without any record: {', '.join(absent)}."


def _of(records: Sequence[Record], network: str) -> list[Record]:
    return [r for r in records if r.workload == network + TRAINING_STEP]
