"""docs/resnet18.md: the plan of a network step by step, from the records that `escalade explain --time` files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from escalade.ops import OPERATIONS
from escalade.terminal_text import counted
from escalade_bench.campaign.networks import STEPS
from escalade_bench.measure.records import Record
from escalade_bench.networks.steps import SUFFIX
from escalade_bench.report import cells, document
from escalade_bench.report.compare import Cards
from escalade_bench.report.document import Heading, Item, origin
from escalade_bench.report.table import Column, Table, columns, items, text

NETWORK, BATCH, DTYPE = STEPS
COMMAND = f"escalade explain {NETWORK} --batch {BATCH} --dtype {DTYPE} --time"
PAGE = f"{NETWORK}.md"
_ABOUT = f"""The plan of ResNet-18 for a batch of {BATCH} in {DTYPE}: what each step computes, the rung that was chosen
and why, the kernel's source under `escalade/kernels/`, and how far its time is from its floor, the least time that the
card needs for the step's operations and bytes. `escalade explain {NETWORK}` shows such a plan for your own GPU;
[engine.md](engine.md) explains how it is made."""


def latest(records: Sequence[Record]) -> tuple[Record, list[Record]] | None:
    """Return plan and steps of the newest run, without leftover steps of an older, longer plan."""
    wanted = (NETWORK + SUFFIX, BATCH, DTYPE)
    own = [record for record in records if (record.workload, record.batch, record.dtype) == wanted]
    newest = max((record.date for record in own), default="")
    run = [record for record in own if record.date == newest]
    whole = [record for record in run if "number" not in record.config]
    steps = sorted((r for r in run if "number" in r.config), key=lambda record: record.config["number"])
    return (whole[0], steps) if whole and steps else None


def page(cards: Cards) -> list[Item]:
    sections = (_section(*run) for records in cards.values() if (run := latest(records)))
    return document.page("ResNet-18, step by step", _ABOUT, sections, f"{COMMAND} --results results")


def _section(plan: Record, steps: Sequence[Record]) -> Iterator[Item]:
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

    def config(heading: str, name: str = "", style: str = "") -> Column:
        return text(heading, lambda r: str(r.config[name or heading]), style)

    shown = [
        *(config("#", "number"), config("in the model", "source"), config("operation")),
        *(config("problem", style="code"), config("rung")),
        text("source", lambda r: ", ".join(r.config["kernels"])),
        *(config("why"), *columns("µs|floor, µs|× floor")),
    ]
    yield Table(shown, steps)
    summaries = {(name, rung.name): rung.summary for name, one in OPERATIONS.items() for rung in one.ladder}
    used = dict.fromkeys((step.config["operation"], step.config["rung"]) for step in steps)
    rungs = [(*key, summaries[key]) for key in used if key in summaries]
    yield Table(items("operation", "rung", "what it changes"), rungs, None, "The rungs", level=3)
