"""Convolutions that nobody tuned for, beside PyTorch: what the choice without measurements is worth."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from escalade import ops
from escalade.bench import ceilings as card
from escalade.bench import store
from escalade.bench.arms import Bench, Settings, Verified, blank_record
from escalade.bench.ceilings import Ceilings
from escalade.bench.commands import chosen_device, status
from escalade.bench.figures import with_gains
from escalade.bench.ladder import free, verified_peers
from escalade.bench.store import Record
from escalade.bench.verify import Case
from escalade.device.cuda import architecture_of
from escalade.tune.choose import estimated
from escalade.tune.sweep import UNTUNED

WORKLOAD = "conv2d_untuned"


def measure(
    problem: Any,
    device: torch.device,
    settings: Settings,
    ceilings: Ceilings | None,
    say: Callable[[str], None],
) -> list[Record]:
    """What the rule chooses, whatever the tables have, verified and timed; and the peers."""
    operation = ops.operation("conv2d")
    choice = estimated("conv2d", problem, architecture_of(device))
    say(f"{problem.name} {problem.dtype}: {choice.rung.name}, {choice.why}")
    case = Case(operation, problem, device, settings.seed)
    outcome = case.check(choice.rung, choice.problem.layout, choice.config)
    if not outcome.passed:
        failed = replace(
            blank_record(operation, choice.problem, "escalade", choice.rung.name),
            config=choice.config.as_dict(),
            failure=outcome.failure,
        )
        return [replace(failed, workload=WORKLOAD)]
    ours = Verified(choice.rung, choice.problem, choice.config, outcome, choice.why)
    rivals = verified_peers(operation, case, settings, say) if device.type == "cuda" else []
    del case
    recipe = choice.rung.recipe(choice.problem, choice.config)
    bench = Bench(operation, problem, device, [recipe], settings, ceilings)
    records = with_gains(bench.measure([ours], rivals), operation.ladder)
    return [replace(record, workload=WORKLOAD) for record in records]


def table(records: Sequence[Record]) -> Table:
    """A row for each of ours, beside its fastest peer; the geometric mean of the gains in the caption."""
    ours = [record for record in records if record.system == "escalade"]
    gains = [record.peer_gain for record in ours if record.peer_gain]
    mean = f"{statistics.geometric_mean(gains):.2f}" if gains else "-"
    shown = Table(
        title="convolutions that nobody tuned for",
        title_justify="left",
        caption=f"{len(gains)} problems: {mean} times the fastest peer's speed in the geometric mean, "
        f"{min(gains, default=0.0):.2f} at worst",
        caption_justify="left",
    )
    for heading in ("problem", "rung", "µs", "peer", "times as fast"):
        shown.add_column(heading, justify="right" if heading in ("µs", "times as fast") else "left")
    for record in ours:
        time = record.failure if record.median_us is None else f"{record.median_us:.2f}"
        gain = f"{record.peer_gain:.2f}" if record.peer_gain else ""
        shown.add_row(record.problem, record.rung, time, record.peer, gain)
    return shown


def command(out: pathlib.Path | None, console: Console | None = None) -> int:
    """0 if every result is right."""
    console = console or Console()
    device = chosen_device("cuda")
    origin = store.provenance(device)
    ceilings = card.measure(device)
    records: list[Record] = []
    for problem in UNTUNED:
        with status(console) as say:
            found = measure(problem, device, Settings(seconds_per_arm=0.1), ceilings, say)
        records += [record.stamped(origin) for record in found]
        if out:
            store.write(out, records)
        free(device)
    console.print(table(records))
    return 1 if any(record.failure for record in records) else 0
