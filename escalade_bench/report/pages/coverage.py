"""docs/coverage.md: every network of a module, from the records that `escalade bench coverage` files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from escalade.terminal_text import counted
from escalade_bench.measure.records import Record
from escalade_bench.networks.plans import spelled
from escalade_bench.peers.comparison import COVERAGE, Clock, by_clock, on_device
from escalade_bench.report import cells, compare, document
from escalade_bench.report.compare import Cards, Compared, Verdict, compared, grouped, place
from escalade_bench.report.document import Heading, Item, origin
from escalade_bench.report.table import Column, Table, columns, text

COMMAND = "escalade bench coverage torchvision --results results"
_INTRODUCTION = f"""The result of compiling every network of a module: its error against float64 and what is allowed,
the steps that PyTorch computes and which, the kernel launches, and times beside PyTorch's CUDA graph (BatchNorm folded,
channels_last) and torch.compile (captured into a graph). Networks are measured one by one. *% of a copy* is the rate at
which inputs, weights and results pass, each once, beside that of a copy: for single layers it shows how near they are
to the card's limit. Weights are random. `{COMMAND}` measures torchvision's networks, any other
module's name those of that module, `escalade_bench.zoo.varied` generators, segmentation, super-resolution, detection
heads, sequences and more, `escalade_bench.zoo.layers` single layers and short chains. `--no-time` makes the plans
without a GPU.

{compare.LEGEND}"""


def network(row: Compared) -> str:
    return row.ours.problem.removesuffix(f"_b{row.ours.batch}").rpartition("_")[0]


def is_right(row: Compared) -> bool:
    return not row.ours.failure and row.ours.error is not None


def fallbacks(row: Compared) -> str:
    """Return the number of steps that PyTorch computes, and which; empty without a plan."""
    counts = row.ours.config.get("pytorch")
    return "" if counts is None else f"{sum(counts.values())} ({spelled(counts)})" if counts else "0"


def verdict(row: Compared) -> str:
    if row.ours.failure:
        return f"failed: {cells.first_line(row.ours.failure)}"
    if row.ours.error is None:
        return "planned"
    return f"{cells.error(row.ours.error)} of {cells.error(row.ours.tolerance)}"


@dataclass(frozen=True)
class Part:
    """All networks of a module in one dtype and batch."""

    workload: str
    dtype: str
    batch: int
    rows: Sequence[Compared]

    @property
    def title(self) -> str:
        return f"{self.workload.removeprefix(COVERAGE)}, {self.dtype}, batch {self.batch}"

    def ratios(self, clock: Clock = on_device) -> dict[str, float]:
        """The speed of correct networks relative to the best peer, by name."""
        return {network(row): ratio for row in self.rows if is_right(row) and (ratio := row.by(clock).ratio)}

    def summary(self) -> str:
        """Count the networks that are compiled, correct, free of PyTorch and faster than the best peer."""
        plans = [row for row in self.rows if fallbacks(row)]
        said = [f"{len(plans)} of {counted(len(self.rows), 'network')} planned"]
        if any(row.ours.error is not None for row in self.rows):
            said.append(f"{sum(map(is_right, self.rows))} right")
        said.append(f"{sum(fallbacks(row) == '0' for row in plans)} without a step in PyTorch")
        for clock, what in ((on_device, "on the device"), (by_clock, "by the wall clock")):
            if ratios := self.ratios(clock):
                slowest = min(ratios, key=lambda name: ratios[name])
                said.append(
                    f"{what} {sum(ratio >= 1 for ratio in ratios.values())} of {len(ratios)} no slower than "
                    f"the best peer, {statistics.geometric_mean(ratios.values()):.2f}× as fast in the geometric "
                    f"mean, {ratios[slowest]:.2f}× at worst ({slowest})"
                )
        lacking = sum(bool(row.device.note) for row in self.rows if is_right(row))
        return "; ".join([*said, *([f"{lacking} without a peer that matters"] if lacking else [])]) + "."

    @property
    def table(self) -> Table:
        shown = [
            text("network", network),
            text("error of allowed", verdict),
            text("in PyTorch", fallbacks),
            Column("launches", lambda row: cells.written("{}", row.ours.config.get("launches"))),
        ]
        systems = ("torch-graph", "torch-compile", "torch-compile-default")
        for clock, unit in ((on_device, "µs"), (by_clock, "µs per call")):
            for column in compare.times(self.rows, clock, systems):
                named = column.heading if "best peer" in column.heading else f"{column.heading}, {unit}"
                shown.append(replace(column, heading=named))
        shown += [*columns("% of a copy", compare.ours), compare.note(on_device)]
        return Table(shown, self.rows, compare.behind, self.title)

    def items(self) -> Iterator[Item]:
        yield Heading(3, self.title)
        yield self.summary()
        everywhere: Counter[str] = Counter()
        for row in self.rows:
            everywhere.update(row.ours.config.get("pytorch", {}))
        if everywhere:
            named = ", ".join(f"{operator} {count}" for operator, count in everywhere.most_common())
            yield f"Steps in PyTorch, over all networks: {named}."
        yield self.table.titled("")


def parts(records: Sequence[Record]) -> list[Part]:
    """The networks by module, dtype and batch."""
    covered = [r for r in records if r.workload.startswith(COVERAGE)]
    groups = grouped(covered, lambda r: (r.workload, r.dtype, r.batch))
    found = [Part(*key, compared(own)) for key, own in groups.items()]
    return sorted(found, key=lambda part: (part.workload, place(part.dtype), part.batch))


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Each part's networks that were run, not only planned."""
    return [
        Verdict.of(
            part.title, ((network(row), row) for row in part.rows if row.ours.failure or is_right(row))
        )
        for part in parts(records)
    ]


def page(cards: Cards) -> list[Item]:
    return document.page("Coverage", _INTRODUCTION, cards, _section, COMMAND, verdicts)


def _section(records: Sequence[Record]) -> Iterator[Item]:
    if covered := [r for r in records if r.workload.startswith(COVERAGE)]:
        yield from (Heading(2, covered[0].gpu), origin(covered))
        yield from (item for part in parts(covered) for item in part.items())


def lines(records: Sequence[Record]) -> Iterator[str]:
    """A line for each network, dtype and batch, for a terminal."""
    for part in parts(records):
        for row in part.rows:
            times = [f"{r.system} {cells.time_or_reason(r, lambda r: r.median_us)} µs" for r in row.records]
            facts = [verdict(row)]
            if fallbacks(row):
                facts.append(f"in PyTorch {fallbacks(row)}, {row.ours.config['launches']} launches")
            facts += times if row.ours.median_us else []
            facts += [f"{cells.times(row.device.ratio)} the best peer"] if row.device.ratio else []
            yield f"{network(row)} {part.dtype} b{part.batch}: {'; '.join(facts)}"
