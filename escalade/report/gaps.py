"""What has not been measured, as a short list for docs/measuring.md, from the records that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from escalade.bench.layers.sets import DIRECTIONS
from escalade.bench.networks import cpu, layer_kinds
from escalade.bench.networks.op_times import OPERATION
from escalade.bench.networks.workloads import WORKLOADS
from escalade.bench.peers.comparison import against_best, by_clock, on_device
from escalade.measure.records import Record
from escalade.ops import OPERATIONS
from escalade.report import ablation_pages, pair_pages, training_pages
from escalade.report.commits import commits_of, newest
from escalade.report.comparisons import compared
from escalade.report.layer_pages import WORKLOADS as LAYER_WORKLOADS
from escalade.report.network_pages import COMPARED, of_network

PART = "gaps"
"""The part of the page, by the markers around it."""
_SUFFIXES = {
    "accuracy": "_accuracy", "batches": "", "phases": "_phases", "stream": "_stream", "score": "_score",
}  # fmt: skip
_ELSEWHERE = (training_pages.PART, ablation_pages.PART, pair_pages.PART, cpu.PART, layer_kinds.PART)
"""Parts of a run that are no part of a network's section."""


def block(records: Sequence[Record]) -> str:
    """A line for each network, the layers and the ladders that lack something; a sentence until there are records."""
    if not records:
        return "Nothing is recorded yet.\n"
    missing = [*_networks(records), *training_pages.gaps(records), *_layers(records), *_ladders(records)]
    lines = [*missing, *_throttled(records)]
    day = max(record.date for record in records)[:10]
    return f"As of {day}, the last day with a record:\n\n" + "".join(f"- {line}\n" for line in lines)


def _networks(records: Sequence[Record]) -> Iterator[str]:
    absent = [name for name in WORKLOADS if not of_network(records, name)]
    for name in WORKLOADS:
        own = of_network(records, name)
        if not own:
            continue
        missing = [
            part
            for part in WORKLOADS[name].parts
            if part not in _ELSEWHERE
            and not any(_is_part(r, name, part) for r in (records if part == "op-times" else own))
        ]
        reasons = [*_without_ratio(name, own)]
        if missing:
            reasons.append(f"no {', '.join(missing)}")
        if reasons:
            yield f"**{name}** at {commits_of(own)}: {'; '.join(reasons)}."
    if absent:
        yield f"**Networks** without any record: {', '.join(absent)}."


def _is_part(record: Record, name: str, part: str) -> bool:
    return record.workload == (OPERATION if part == "op-times" else name + _SUFFIXES[part])


def _without_ratio(name: str, own: Sequence[Record]) -> Iterator[str]:
    """What is missing for a ratio over the best peer, and where."""
    found: dict[str, list[str]] = {}
    for suffix in COMPARED:
        for one in compared([r for r in own if r.workload == name + suffix]):
            why = dict.fromkeys(against_best(one.records, clock).why for clock in (on_device, by_clock))
            where = f"{suffix.removeprefix('_')} {one.dtype} b{one.batch}".strip()
            for reason in filter(None, why):
                found.setdefault(reason, []).append(where)
    for reason, places in found.items():
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        yield f"{reason} ({', '.join(places[:4])}{more})"


def _throttled(records: Sequence[Record]) -> Iterator[str]:
    """How many times were taken with the clock held down, of those of which that is known."""
    known = [record for record in records if record.conditions]
    held = Counter(record.throttled for record in known if record.throttled)
    if held:
        reasons = ", ".join(f"{count} by {why}" for why, count in held.most_common())
        yield f"**Clocks** were held down in {held.total()} of {len(known)} measurements: {reasons}."


def _layers(records: Sequence[Record]) -> Iterator[str]:
    for direction in DIRECTIONS:
        own = [r for r in records if r.workload == LAYER_WORKLOADS[direction]]
        if not own:
            yield f"**Layers**, {direction.replace('_', ' ')}: none."
            continue
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in own:
            groups.setdefault(record.comparison, []).append(record)
        verdicts = [against_best(newest(group)) for group in groups.values()]
        without = Counter(found.why for found in verdicts if found.why)
        reasons = [f"{why} ({count} of {len(groups)})" for why, count in without.items()]
        if not any(r.floor_us for r in own):
            reasons.append("floors were counted otherwise then, and are not shown")
        if reasons:
            yield f"**Layers**, {direction.replace('_', ' ')}: {'; '.join(reasons)}."


def _ladders(records: Sequence[Record]) -> Iterator[str]:
    measured = {record.workload for record in records}
    without = [name for name in OPERATIONS if name not in measured]
    if without:
        yield f"**Ladders** without any record: {', '.join(without)}."
    unpaired = [
        name
        for name in OPERATIONS
        if name in measured and not any(r.workload == name and r.is_peer and r.median_us for r in records)
    ]
    if unpaired:
        yield f"**Ladders** without a peer: {', '.join(unpaired)}."
    for suffix, what in (("_ablation", "One idea switched off"), ("_crossover", "Crossovers")):
        if "conv2d" + suffix not in measured:
            yield f"**{what}** (`escalade ladder conv2d --{'ablate' if suffix == '_ablation' else 'crossover'}`)."
