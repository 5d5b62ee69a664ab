"""docs/ladder.md and docs/ladders/<operation>.md: the climb, and every rung of every ladder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources

from escalade.ops import OPERATIONS
from escalade_bench.measure.figures import below, fastest
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import against_best
from escalade_bench.report import cells, plots
from escalade_bench.report.compare import Cards, grouped, named, of, place
from escalade_bench.report.document import Bar, Heading, Item, Plot, begun, not_measured, origin
from escalade_bench.report.table import Column, Table, columns, text

FOLDER = "ladders"
"""The folder of the operations' pages, below docs/."""
CLIMB = ("conv2d", "64to64_56_k3s1_b256")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_FIGURE = re.compile(r"\[\[(\w+) (\w+) (\w+)\]\]")


def workloads(operation: str) -> set[str]:
    return {operation, f"{operation}_ablation", f"{operation}_crossover"}


def overview(cards: Cards) -> list[Item]:
    """docs/ladder.md."""
    about = "All rungs and configs are on the pages of the operations."
    made = begun("The ladders, measured", about)
    for own in cards.values():
        made.append(Heading(2, own[0].gpu))
        if ceilings := of(own, "ceilings"):
            made.append(
                Table(columns("what=problem|dtype|TFLOP/s|GB/s"), ceilings, title="Ceilings", level=3)
            )
        made += climb_section(own)
        measured = [name for name in OPERATIONS if of(own, name)]
        if measured:
            made += [
                Heading(3, "Every ladder"),
                "The fastest rung of each problem and dtype, and the best peer.",
            ]
        made += [_best(of(own, name)).titled(f"[{name}]({FOLDER}/{name}.md)") for name in measured]
    return made if cards else [*made, not_measured("escalade measure")]


@dataclass(frozen=True)
class Step:
    """A rung's record, with the nearest rung below it that was measured."""

    record: Record
    below: Record | None = None

    @property
    def gain(self) -> float | None:
        return self.below.time / self.record.time if self.below else None

    @property
    def over(self) -> str:
        other = "" if self.below is None or self.below.dtype == self.record.dtype else f" {self.below.dtype}"
        return f"{self.below.rung}{other}" if self.below else ""


def _own(step: Step) -> Record:
    return step.record


GAIN = [
    Column("gain", lambda s: cells.times(s.gain)),
    *columns("predicted", _own),
    text("over", lambda s: s.over),
]


def steps(records: Sequence[Record]) -> list[Step]:
    """Return all records of one problem; our timed ones with the best time of the nearest rung below."""
    own = [r for r in records if not r.is_peer and r.median_us is not None and r.timing != "twin"]
    return [
        Step(
            r,
            below(r, own, OPERATIONS[r.workload].ladder)
            if r.median_us and r.workload in OPERATIONS
            else None,
        )
        for r in records
    ]


def climb(records: Sequence[Record]) -> list[Step]:
    """Return each rung's best record in fp32 and in fp16, or in its first other dtype, from the foot up."""
    timed = steps(
        [r for r in of(records, CLIMB[0]) if r.problem == CLIMB[1] and r.median_us and not r.is_peer]
    )
    best: list[Step] = []
    for rung in OPERATIONS[CLIMB[0]].ladder:
        of_rung = [step for step in timed if step.record.rung == rung.name]
        measured = sorted({step.record.dtype for step in of_rung}, key=lambda dtype: place(dtype, DTYPES))
        for dtype in [dtype for dtype in measured if dtype in ("fp32", "fp16")] or measured[:1]:
            best.append(min((s for s in of_rung if s.record.dtype == dtype), key=lambda s: s.record.time))
    return sorted(best, key=lambda step: place(step.record.dtype, DTYPES))


def peers(records: Sequence[Record]) -> dict[str, Record]:
    """The fastest peer on the climb's problem, by dtype."""
    own = [r for r in of(records, CLIMB[0]) if r.problem == CLIMB[1] and r.is_peer]
    return {dtype: best for dtype, some in grouped(own, lambda r: r.dtype).items() if (best := fastest(some))}


def ceilings(records: Sequence[Record]) -> dict[str, float]:
    """The best matrix product of the card in GFLOP/s, by dtype."""
    return {r.dtype: 1000 * r.tflops for r in of(records, "ceilings") if r.tflops}


def _of_ceiling(record: Record, most: Mapping[str, float]) -> str:
    rate, ceiling = record.tflops, most.get(record.dtype)
    return f"{1e5 * rate / ceiling:.1f}" if rate and ceiling else ""


def climb_section(records: Sequence[Record]) -> Iterator[Item]:
    """The climb's table and plot; nothing until it was measured."""
    found, most = climb(records), ceilings(records)
    if not found:
        return
    summaries = {rung.name: rung.summary for rung in OPERATIONS[CLIMB[0]].ladder}

    shown = [
        text("rung", lambda s: cells.peer(s.record) if s.record.is_peer else s.record.rung),
        text("what it changes", lambda s: summaries.get(s.record.rung, "")),
        *columns("dtype|layout|µs|GFLOP/s", _own),
        Column("% of ceiling", lambda s: _of_ceiling(s.record, most)),
        *GAIN,
    ]
    yield Heading(3, f"The climb: {CLIMB[0]} `{CLIMB[1]}`")
    yield (
        "Every rung in fp32 and in fp16, each in its faster layout, by the best record there is. *gain* is over the "
        "nearest rung below that was measured, which *over* names; *predicted* was written down before the first run. "
        "GFLOP/s count the operations of the plain algorithm: Winograd, FFT and products on tensor cores can pass the "
        "fp32 ceiling."
    )
    yield climb_plot(records)
    yield Table(shown, [*map(Step, peers(records).values()), *found], lambda s: (s.record,))


def climb_plot(records: Sequence[Record]) -> Plot:
    found = [s.record for s in climb(records)]
    title = f"The climb of {CLIMB[0]}, {CLIMB[1]}, on an {found[0].gpu}"
    most, best = ceilings(records), peers(records)
    bars = [
        Bar(f"{r.rung}, {r.dtype}", 1000 * (r.tflops or 0), f"{1000 * (r.tflops or 0):,.0f}") for r in found
    ]
    for dtype in dict.fromkeys(r.dtype for r in found):
        if dtype in best and (rate := best[dtype].tflops):
            bars.append(Bar(f"cuDNN, {dtype}", 1000 * rate, f"{1000 * rate:,.0f}", "blue"))
        if dtype in most:
            bars.append(Bar(f"ceiling, {dtype}", most[dtype], f"{most[dtype]:,.0f}", "grey"))
    draw = partial(plots.climb, found, most, best, title)
    return Plot(named("climb", found[0]), title, draw, bars=bars)


def _best(records: Sequence[Record]) -> Table:
    """A row for each problem and dtype."""
    problems = list(dict.fromkeys(r.problem for r in records))
    groups = grouped(records, lambda r: (problems.index(r.problem), place(r.dtype, DTYPES)))
    rows = [found for key in sorted(groups) if (found := against_best(groups[key])).ours]

    shown = [
        *columns("problem|dtype|fastest rung=rung|layout|µs|GFLOP/s|GB/s|× floor", lambda row: row.ours),
        Column("peer's µs", lambda row: cells.microseconds(row.peer)),
        text("best peer", lambda row: cells.peer(row.peer)),
        Column("vs best peer", lambda row: cells.times(row.ratio)),
    ]
    return Table(shown, rows, lambda row: (row.ours,))


def operation_pages(cards: Cards) -> dict[str, list[Item]]:
    """Return the page of every measured operation, by its path under docs/."""
    found: dict[str, list[Item]] = {}
    for name in OPERATIONS:
        made = [item for own in cards.values() for item in operation_section(name, own)]
        if made:
            about = (
                learned(name, next(iter(cards.values()))) or "The other ladders: [ladder.md](../ladder.md)."
            )
            found[f"{FOLDER}/{name}.md"] = [*begun(f"The ladder of {name}, measured", about, "../"), *made]
    return found


def learned(operation: str, records: Sequence[Record]) -> str:
    """Return the lessons of the climb: a text of this package with figures filled in from records.

    A line is left out until all of its figures are measured.
    """
    source = resources.files("escalade_bench.report") / "texts" / f"{operation}.md"
    known = {(s.record.rung, s.record.dtype): s for s in climb(records)}

    def filled(found: re.Match[str]) -> str:
        step = known.get((found[1], found[2]))
        if step is None:
            return ""
        return {
            "gflops": cells.gflops(step.record),
            "ceiling": _of_ceiling(step.record, ceilings(records)),
            "gain": cells.times(step.gain),
            "predicted": cells.times(step.record.predicted_gain),
        }[found[3]]

    lines = source.read_text().splitlines() if source.is_file() and known else []
    return "\n".join(_FIGURE.sub(filled, line) for line in lines if all(map(filled, _FIGURE.finditer(line))))


def operation_section(name: str, everything: Sequence[Record]) -> Iterator[Item]:
    records = of(everything, *workloads(name))
    if not records:
        return
    yield Heading(2, records[0].gpu)
    yield origin(records)
    for problem, own in grouped(of(records, name), lambda r: r.problem).items():
        yield problem_table(own).titled(f"{name} `{problem}`", 3)
    ablated = columns("dtype|layout|rung|µs|GFLOP/s|the idea's gain=gain|error|config")
    for problem, own in grouped(of(records, f"{name}_ablation"), lambda r: r.problem).items():
        yield Table(ablated, own, title=f"One idea switched off: {name} `{problem}`", level=3)
    if sweep := of(records, f"{name}_crossover"):
        yield _crossover(name, sweep).titled(f"Which algorithm wins as the filter grows: {name}", 3)


def problem_table(records: Sequence[Record]) -> Table:
    """The peers, then the rungs, dtype by dtype."""
    operation = OPERATIONS.get(records[0].workload)
    order = [rung.name for rung in operation.ladder] if operation else []
    best = {dtype: against_best(own).peer for dtype, own in grouped(records, lambda r: r.dtype).items()}

    def key(s: Step) -> tuple[object, ...]:
        r = s.record
        return place(r.dtype, DTYPES), not r.is_peer, r.layout, place(r.rung, order), r.system

    def over_peer(s: Step) -> str:
        peer = best[s.record.dtype]
        return "" if s.record.is_peer or peer is None else cells.quotient(peer.median_us, s.record.median_us)

    shown = [
        *columns("dtype|rung|layout|µs|GFLOP/s|% of ceiling|× floor", _own),
        *GAIN,
        Column("vs best peer", over_peer),
        text("best peer", lambda s: cells.peer(best[s.record.dtype]) if over_peer(s) else ""),
        *columns("error|GB/s|p20–p80|registers|occupancy|config", _own),
    ]
    return Table(shown, sorted(steps(records), key=key), lambda s: (s.record,))


def _crossover(operation: str, records: Sequence[Record]) -> Table:
    """A row for each problem of the sweep: the peer's and every rung's best layout, and the fastest of all."""
    order = [rung.name for rung in OPERATIONS[operation].ladder]
    rungs = sorted({r.rung for r in records if r.rung}, key=lambda rung: place(rung, order))
    names, rows = ("", *rungs), []
    for (problem, dtype), own in grouped(records, lambda r: (r.problem, r.dtype)).items():
        best, winner = [fastest(r for r in own if r.rung == name) for name in names], fastest(own)
        said = f"{cells.who(winner)} {winner.layout}" if winner else ""
        rows.append((problem, dtype, *map(cells.microseconds, best), said, own))
    heads = ("`problem", "dtype", *(f">{name or 'PyTorch'}" for name in names), "the fastest")
    return Table.of("|".join(heads), rows)
