"""The command `ladder`: rungs verified, then timed beside their peers."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import ops
from escalade.bench import ladder as climbing
from escalade.bench.trial import Settings
from escalade.commands.compiling import compile_for
from escalade.commands.devices import kernel_device
from escalade.commands.options import (
    Dtypes,
    InputSeed,
    KernelsOn,
    Layouts,
    Operation,
    Problems,
    RecordsFile,
    RecordsFolder,
    Rungs,
    duration,
)
from escalade.commands.progress import status
from escalade.commands.selection import Selection
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as measuring
from escalade.measure import records as store
from escalade.measure import verification
from escalade.ops.base.card import Card
from escalade.report import terminal


def command(
    operation: Operation,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: KernelsOn = None,
    tune: Annotated[bool, typer.Option(help="Time every config of every rung, and keep the best.")] = False,
    ablate: Annotated[
        bool, typer.Option(help="Also time the rungs that offer it with one idea off at a time.")
    ] = False,
    crossover: Annotated[
        bool, typer.Option(help="Measure the sweep over filter sizes instead of the usual problems.")
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(help="Also beside torch.compile in max-autotune: seconds and more for each problem."),
    ] = False,
    seconds: Annotated[float, duration("How long to measure each rung.")] = 0.3,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """The rungs of an operation, verified and then timed beside PyTorch and the card's ceilings."""
    console = Console()
    chosen = ops.operation(operation)
    where = kernel_device(device)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or _usual_problems(chosen, where, crossover)
    dtypes = selection.dtypes
    if where.type != "cuda":
        dtypes = dtypes or chosen.dtypes[:1]  # g++ compiles every rung for every dtype first
        console.print(
            f"On the twin, in {', '.join(dtypes)}: results are checked, and wall-clock seconds of the CPU shown; "
            "[yellow]they are no speeds.[/]"
        )
    settings = Settings(
        dtypes, selection.layouts, selection.rungs, tune, compiled=compiled, seed=seed, seconds_each=seconds
    )
    origin = store.provenance(where)
    ceilings = None
    failed = 0
    planned = _jobs(chosen, problems, settings, where)
    selection.require_work(planned, "measure")
    if ablate:
        planned += _ablation_jobs(chosen, problems, settings, where)
    compile_for(planned, where, console)
    if where.type == "cuda":
        console.print("Measuring the card's ceilings")
        ceilings = measuring.measure(where)
        console.print(terminal.ceilings_line(ceilings))
    for each in problems:
        with status(console) as say:
            records = climbing.climb(chosen, each, where, settings, ceilings, say)
            if crossover:
                records = [replace(record, workload=f"{chosen.name}_crossover") for record in records]
            if ablate:
                records += climbing.ablate(chosen, each, where, settings, ceilings, say)
        records = [record.stamped(origin) for record in records]
        failed += sum(bool(record.failure) and not record.is_peer for record in records)
        _show(records, console)
        _save(records, json, results, console)
    if ceilings and results:
        store.file_away(results, [r.stamped(origin) for r in measuring.records(ceilings)])
    if failed:
        console.print(f"[red]{failed} failed; they were not timed.[/]")
        raise typer.Exit(1)


def _usual_problems(operation: Any, device: torch.device, crossover: bool) -> tuple[Any, ...]:
    if crossover:
        sweep = operation.crossover
        if not sweep:
            raise UnsupportedError(f"{operation.name} has no crossover sweep; leave --crossover out")
        return sweep
    return tuple(operation.problems if device.type == "cuda" else operation.small_problems[:1])


def _jobs(
    operation: Any, problems: Sequence[Any], settings: Settings, device: torch.device
) -> list[verification.Job]:
    return verification.jobs(
        operation,
        device,
        problems=problems,
        rungs=settings.rungs,
        dtypes=settings.dtypes or operation.dtypes,
        layouts=settings.layouts or operation.layouts,
        configs="all" if settings.tune else "default",
    )


def _ablation_jobs(
    operation: Any, problems: Sequence[Any], settings: Settings, device: torch.device
) -> list[verification.Job]:
    """What `--ablate` runs besides: every variant with one idea off."""
    card, configs = Card.of(device), "all" if settings.tune else "default"
    dtypes, layouts = settings.dtypes or operation.dtypes, settings.layouts or operation.layouts
    variants = [rung for group in climbing.ablations(operation).values() for rung in group.values()]
    return [
        job
        for problem, dtype, layout, rung in itertools.product(problems, dtypes, layouts, variants)
        for job in verification.rung_jobs(rung, replace(problem, dtype=dtype, layout=layout), card, configs)
    ]


def _show(records: list[store.Record], console: Console) -> None:
    for table in terminal.ladder_tables(records):
        console.print(table)
    if line := terminal.conditions_line(record.conditions for record in records):
        console.print(line, highlight=False)
    for record in records:
        if record.failure:
            kind = "[yellow]note:[/]" if record.is_peer else "[red]failed:[/]"
            console.print(f"{kind} {escape(terminal.failure(record))}")
        elif record.note and record.timing != "twin":
            console.print(f"[yellow]note:[/] {escape(terminal.remark(record))}")


def _save(
    records: list[store.Record], json: pathlib.Path | None, results: pathlib.Path | None, console: Console
) -> None:
    """Saves after every problem, so that a run that is stopped keeps what it has."""
    if json:
        store.write(json, records)
    if results:
        for path in store.file_away(results, records):
            console.print(f"wrote {path}")
