"""What each technique of a training step brings, in docs/training-steps.md, from the records in results/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from escalade.bench.networks.ablation import ALL, JOINT, NONE, ONLY, SUFFIX, WITHOUT
from escalade.bench.networks.workloads import WORKLOADS
from escalade.bench.peers.comparison import by_clock, on_device
from escalade.engine.training.techniques import GRAPH, TECHNIQUES
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.commits import newest
from escalade.report.markdown import origin, table

PART = "training-ablation"
"""The generated part of the page, by the markers around it, and the part of `escalade bench` that measures it."""
_COMMAND = "escalade bench autoencoder --parts {part} --dtype fp16 --results results"
NOISE = 0.03
"""How far an interplay may be from 1 and still be taken for none."""


def block(records: Sequence[Record]) -> str:
    """A section for each network, batch and dtype that was measured, of one commit; without any it says so."""
    return "".join(map(_section, measured(records, SUFFIX))) or nothing(PART)


def nothing(part: str) -> str:
    """What stands on the page until a part has been measured."""
    command = _COMMAND.format(part=part)
    return f"It has not been measured yet. On a machine with a GPU: `{command}`, then `escalade tables`.\n"


def measured(records: Sequence[Record], suffix: str) -> Iterator[list[Record]]:
    """The records of each network, batch and dtype, of what was measured last."""
    for name in WORKLOADS:
        own = newest([r for r in records if r.workload == name + suffix])
        for problem, dtype in dict.fromkeys((r.problem, r.dtype) for r in own):
            yield [r for r in own if (r.problem, r.dtype) == (problem, dtype)]


def _section(records: Sequence[Record]) -> str:
    first = records[0]
    found = {record.rung: record for record in records}
    parts = [
        f"### {first.workload.removesuffix(SUFFIX)}, batch {first.batch}, {first.dtype}, on an {first.gpu}\n\n",
        origin(records), "\n", _techniques(found),
    ]  # fmt: skip
    pairs = [pair for pair in _pairs(found) if abs(pair.interplay - 1) > NOISE]
    if pairs:
        parts += [
            "\nPairs whose gains are not the product of both; below 1 they do the same work in part, or stand in each "
            "other's way, above 1 one makes room for the other:\n\n",
            table(_PAIRS, [pair.cells for pair in sorted(pairs, key=lambda pair: pair.interplay)], left=2),
        ]
    return "".join(parts)


@dataclass(frozen=True)
class Gain:
    """How many times as fast a technique makes a step, alone and among all others."""

    technique: str
    alone: float | None
    among_all: float | None


def gains(records: Sequence[Record]) -> list[Gain]:
    """The gain of each technique that changes the plan, by the records of one network, batch and dtype."""
    found = {record.rung: record for record in records}
    whole, nothing = found.get(ALL), found.get(NONE)
    every = [
        Gain(name, _ratio(nothing, found.get(ONLY + name)), _ratio(found.get(WITHOUT + name), whole))
        for name in _changing(found)
    ]
    return [gain for gain in every if gain.alone or gain.among_all]


def _changing(found: Mapping[str, Record]) -> Iterator[str]:
    """The techniques without which the plan is another."""
    for name in TECHNIQUES:
        removed = found.get(WITHOUT + name)
        if removed is not None and (name == GRAPH or not _same_plan(removed, found.get(ALL))):
            yield name


def _techniques(found: Mapping[str, Record]) -> str:
    """A row for the whole and for nothing, and for each technique that changes the plan."""
    whole, nothing = found.get(ALL), found.get(NONE)
    rows = [
        ("**all**", "", *_time_and_gain(whole, nothing), "", ""),
        ("none", "", *_time_and_gain(nothing, nothing), "", ""),
    ]
    for name in _changing(found):
        removed = found[WITHOUT + name]
        brought = _ratio(removed, whole)
        rows.append(
            (f"`{name}`", TECHNIQUES[name], *_time_and_gain(found.get(ONLY + name), nothing), _time(removed),
             cells.times(brought))
        )  # fmt: skip
    header = (
        "technique", "what it does", "alone: µs a call", "faster than none", "left out: µs a call",
        "faster with it",
    )  # fmt: skip
    return table(header, rows, left=2)


def _same_plan(one: Record, other: Record | None) -> bool:
    return other is not None and not one.failure and one.config.get("plan") == other.config.get("plan")


def _time_and_gain(record: Record | None, nothing: Record | None) -> tuple[str, str]:
    return _time(record), cells.times(_ratio(nothing, record))


def _time(record: Record | None) -> str:
    return cells.time_or_reason(record, by_clock)


def _ratio(slow: Record | None, fast: Record | None) -> float | None:
    """How many times as fast the second is: on the device where both were timed there, else by the clock."""
    if slow is None or fast is None:
        return None
    for clock in (on_device, by_clock):
        before, after = clock(slow), clock(fast)
        if before and after:
            return before / after
    return None


_PAIRS = ("technique", "and", "neither", "the first alone", "the second alone", "both", "interplay")


@dataclass(frozen=True)
class _Pair:
    """Two techniques among all others: how much faster each makes a step, and both do."""

    first: str
    second: str
    gains: tuple[float, float, float]
    """Over neither: of the first, of the second, of both."""

    @property
    def interplay(self) -> float:
        """The gain of both over the product of theirs."""
        first, second, both = self.gains
        return both / (first * second)

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            f"`{self.first}`", f"`{self.second}`", "1", *map(cells.times, self.gains), f"{self.interplay:.2f}"
        )  # fmt: skip


def _pairs(found: Mapping[str, Record]) -> Iterator[_Pair]:
    for rung, neither in found.items():
        names = rung.removeprefix(WITHOUT).split(JOINT)
        if not rung.startswith(WITHOUT) or len(names) != 2:
            continue
        first, second = names
        others = (found.get(WITHOUT + second), found.get(WITHOUT + first), found.get(ALL))
        gains = [gain for other in others if (gain := _ratio(neither, other)) is not None]
        if len(gains) == 3:
            yield _Pair(first, second, (gains[0], gains[1], gains[2]))
