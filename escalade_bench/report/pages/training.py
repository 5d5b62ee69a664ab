"""The generated parts of docs/training-steps.md: steps and peers, techniques, and variants of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from escalade.engine.training.settings import GRAPH, TECHNIQUES
from escalade.ops import OPERATIONS
from escalade.terminal_text import counted
from escalade_bench.campaign.networks import STEPS
from escalade_bench.measure.records import Record
from escalade_bench.networks.plans import STEPS as SUFFIX
from escalade_bench.networks.training_step import ABLATION, ALL, GROUPS, JOINT, NONE, ONLY, PAIRS, WITHOUT
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers.comparison import TRAINING_STEP, by_clock, on_device
from escalade_bench.report import cells, compare, document
from escalade_bench.report.compare import Cards, grouped, of
from escalade_bench.report.document import Heading, Item, not_measured, origin
from escalade_bench.report.table import Table, items

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
        others = (removed(second), removed(first), whole) if joint else ()
        gains = [gain(removed(row), other) or 0.0 for other in others]
        return f"{gains[2] / (gains[0] * gains[1]):.2f}" if gains and all(gains) else ""

    joint = [name.removeprefix(WITHOUT) for name in found if name.startswith(WITHOUT) and JOINT in name]
    names = [row for row in (ALL, NONE) if row in found] + [row for row in TECHNIQUES if changes(row)] + joint
    legend = (
        "*Interplay* is the gain of two techniques over the product of their gains: below 1 they do part of the same "
        "work, or hinder each other; above 1 one makes room for the other."
    )
    heads = (
        "`technique|what it does|>alone: µs per call|>faster than none|>left out: µs per call|>faster with it|"
        ">interplay"
    )
    rows = [
        (name, TECHNIQUES.get(name, ""), cells.time_or_reason(alone(name), by_clock),
         cells.times(gain(none, alone(name))), cells.time_or_reason(removed(name), by_clock),
         cells.times(gain(removed(name), whole)), interplay(name), (alone(name), removed(name)))
        for name in names
    ]  # fmt: skip
    return Table.of(heads, rows, legend=legend if joint else "")


def gain(slow: Record | None, fast: Record | None) -> float | None:
    """The ratio of two times: device times where both have them, else wall-clock times."""
    for clock in (on_device, by_clock):
        before, after = clock(slow) if slow else None, clock(fast) if fast else None
        if before and after:
            return before / after
    return None


def _over(base: Record | None, record: Record) -> str:
    return cells.quotient(base.median_us, record.median_us) if base else ""


def pair_tables(records: Sequence[Record]) -> Iterator[Table]:
    for (problem, dtype), own in grouped(records, lambda r: (r.problem, r.dtype)).items():
        found = {record.rung: record for record in own}
        rows = [
            (title, name, cells.microseconds(r) or cells.reason(r), _over(found.get(ways[0]), r), [r])
            for title, ways in GROUPS.items()
            for name in ways
            if (r := found.get(name))
        ]
        yield Table.of("what|how|>µs|>faster than the first", rows, f"Pairs, {problem}, {dtype}")


NETWORK, BATCH, DTYPE = STEPS
COMMAND = f"escalade explain {NETWORK} --batch {BATCH} --dtype {DTYPE} --time"
PAGE = f"{NETWORK}.md"
_ABOUT = f"""The plan of ResNet-18 for a batch of {BATCH} in {DTYPE}: what each step computes, the rung that was chosen
and why, the kernel's source under `escalade/kernels/`, and how far its time is from its floor, the least time that the
card needs for the step's operations and bytes. `escalade explain {NETWORK}` shows such a plan for your own GPU;
[engine.md](engine.md) explains how it is made."""


def latest_run(records: Sequence[Record]) -> tuple[Record, list[Record]] | None:
    """Return plan and steps of the newest run, without leftover steps of an older, longer plan."""
    wanted = (NETWORK + SUFFIX, BATCH, DTYPE)
    own = [record for record in records if (record.workload, record.batch, record.dtype) == wanted]
    newest = max((record.date for record in own), default="")
    run = [record for record in own if record.date == newest]
    whole = [record for record in run if "number" not in record.config]
    steps = sorted((r for r in run if "number" in r.config), key=lambda record: record.config["number"])
    return (whole[0], steps) if whole and steps else None


def step_page(cards: Cards) -> list[Item]:
    return document.page("ResNet-18, step by step", _ABOUT, cards, _section, f"{COMMAND} --results results")


def _section(records: Sequence[Record]) -> Iterator[Item]:
    run = latest_run(records)
    if run is None:
        return
    plan, steps = run
    yield Heading(2, plan.gpu)
    yield origin([plan, *steps])
    alone = sum(step.median_us for step in steps if step.median_us is not None)
    yield (
        f"{counted(plan.config['steps'], 'step')}, {counted(plan.config['launches'], 'launch')}. "
        f"In one go, as a call runs it, the plan "
        f"takes **{cells.figure(plan.median_us)} µs**; its floor, the sum of the steps' floors, is "
        f"{cells.figure(plan.floor_us)} µs. The steps timed by themselves, over warm caches, take "
        f"{cells.figure(alone)} µs together; in the plan launches overlap, and each finds the caches as the step "
        "before left them."
    )

    named = ("number", "source", "operation", "problem", "rung")
    rows = [
        (*(r.config[name] for name in named), ", ".join(r.config["kernels"]), r.config["why"], cells.microseconds(r),
         cells.figure(r.floor_us), cells.over_floor(r), [r])
        for r in steps
    ]  # fmt: skip
    yield Table.of("#|in the model|operation|`problem|rung|source|why|>µs|>floor, µs|>× floor", rows)
    summaries = {(name, rung.name): rung.summary for name, one in OPERATIONS.items() for rung in one.ladder}
    used = dict.fromkeys((step.config["operation"], step.config["rung"]) for step in steps)
    rungs = [(*key, summaries[key]) for key in used if key in summaries]
    yield Table(items("operation", "rung", "what it changes"), rungs, None, "The rungs", level=3)
