"""The generated parts of docs/training-steps.md: steps and peers, techniques, and variants of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from escalade.engine.training.settings import GRAPH, TECHNIQUES
from escalade_bench.measure.records import Record
from escalade_bench.networks.step_variants import ABLATION, ALL, GROUPS, JOINT, NONE, ONLY, PAIRS, WITHOUT
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers.comparison import TRAINING_STEP, by_clock, on_device
from escalade_bench.report import cells, compare
from escalade_bench.report.compare import grouped, of
from escalade_bench.report.document import Heading, Item, not_measured, origin
from escalade_bench.report.table import Column, Table, text

_COMMAND = "escalade bench autoencoder --parts {} --results results"


def steps(records: Sequence[Record]) -> list[Item]:
    """A section for each network whose steps were measured."""
    made: list[Item] = []
    for name in dict.fromkeys(r.workload for r in records if r.workload.endswith(TRAINING_STEP)):
        own = of(records, name)
        size = own[0].problem.partition("_")[0]
        what = f"rows of {size}" if compare.of_rows(own) else f"{size}² images"
        title = f"{name.removesuffix(TRAINING_STEP)}, {what}, on an {own[0].gpu}"
        made += [Heading(3, title), origin(own), *compare.both_clocks(own, "Step")]
        peak = compare.memory(own, "Peak memory in MiB")
        made += [peak] if peak.rows else []
    return made or [not_measured(_COMMAND.format("training-step --peers all"))]


def techniques(records: Sequence[Record]) -> list[Item]:
    """Show the gain of each technique, alone and among all others."""
    return _each(records, ABLATION, ablation_tables) or [not_measured(_COMMAND.format("training-ablation"))]


def pairs(records: Sequence[Record]) -> list[Item]:
    """Ways to feed a step and to allocate its memory."""
    return _each(records, PAIRS, pair_tables) or [not_measured(_COMMAND.format("training-pairs"))]


def _each(
    records: Sequence[Record], suffix: str, make: Callable[[Sequence[Record]], Iterator[Table]]
) -> list[Item]:
    made: list[Item] = []
    for name in WORKLOADS:
        if own := of(records, name + suffix):
            made += [f"{name}, on an {own[0].gpu}. {origin(own)}", *make(own)]
    return made


def ablation_tables(records: Sequence[Record]) -> Iterator[Table]:
    """A table for each batch and dtype: all techniques, none, each one that changes the plan, and pairs of them."""
    for (problem, dtype), own in grouped(records, lambda r: (r.problem, r.dtype)).items():
        yield _techniques({r.rung: r for r in own}).titled(f"Techniques, {problem}, {dtype}")


def _techniques(found: dict[str, Record]) -> Table:
    whole, none = found.get(ALL), found.get(NONE)

    def alone(row: str) -> Record | None:
        return found.get(row if row in (ALL, NONE) else ONLY + row)

    def removed(row: str) -> Record | None:
        return found.get(WITHOUT + row)

    def changes(row: str) -> bool:
        """Return whether the plan is another without the technique."""
        record = removed(row)
        same = (
            whole and record and not record.failure and record.config.get("plan") == whole.config.get("plan")
        )
        return record is not None and (row == GRAPH or not same)

    def interplay(row: str) -> str:
        """The gain of two techniques together over the product of the gains that each has without the other."""
        first, joint, second = row.partition(JOINT)
        gains = (
            [gain(removed(row), other) for other in (removed(second), removed(first), whole)] if joint else []
        )
        return f"{(gains[2] or 0) / ((gains[0] or 1) * (gains[1] or 1)):.2f}" if joint and all(gains) else ""

    joint = [name.removeprefix(WITHOUT) for name in found if name.startswith(WITHOUT) and JOINT in name]
    rows = [row for row in (ALL, NONE) if row in found] + [row for row in TECHNIQUES if changes(row)] + joint
    columns = [
        text("technique", lambda row: row, style="code"),
        text("what it does", lambda row: TECHNIQUES.get(row, "")),
        Column("alone: µs per call", lambda row: cells.time_or_reason(alone(row), by_clock)),
        Column("faster than none", lambda row: cells.times(gain(none, alone(row)))),
        Column("left out: µs per call", lambda row: cells.time_or_reason(removed(row), by_clock)),
        Column("faster with it", lambda row: cells.times(gain(removed(row), whole))),
        Column("interplay", interplay),
    ]
    legend = (
        "*Interplay* is the gain of two techniques over the product of their gains: below 1 they do part of the same "
        "work, or hinder each other; above 1 one makes room for the other."
    )
    return Table(
        columns, rows, lambda row: filter(None, (alone(row), removed(row))), "", legend if joint else ""
    )


def gain(slow: Record | None, fast: Record | None) -> float | None:
    """The ratio of two times: device times where both have them, else wall-clock times."""
    for clock in (on_device, by_clock):
        before, after = clock(slow) if slow else None, clock(fast) if fast else None
        if before and after:
            return before / after
    return None


def pair_tables(records: Sequence[Record]) -> Iterator[Table]:
    for (problem, dtype), own in grouped(records, lambda r: (r.problem, r.dtype)).items():
        found = {record.rung: record for record in own}
        rows = [
            (title, name, found[name], found.get(ways[0]))
            for title, ways in GROUPS.items()
            for name in ways
            if name in found
        ]
        columns = [
            text("what", lambda row: row[0]),
            text("how", lambda row: row[1]),
            Column("µs", lambda row: cells.microseconds(row[2]) or cells.reason(row[2])),
            Column(
                "faster than the first",
                lambda row: cells.quotient(row[3] and row[3].median_us, row[2].median_us),
            ),
        ]
        yield Table(columns, rows, lambda row: (row[2],), f"Pairs, {problem}, {dtype}")
