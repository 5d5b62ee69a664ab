"""The command `count`: what rungs ask of memory and of each unit, as the twin counts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import ops
from escalade.commands.compiling import compile_for
from escalade.commands.options import (
    Dtypes,
    InputSeed,
    Layouts,
    Operation,
    Problems,
    RecordsFile,
    RecordsFolder,
    Rungs,
)
from escalade.commands.progress import progress_bar
from escalade.commands.selection import Selection
from escalade.device.run import TwinOptions
from escalade.tune import verification
from escalade_bench.measure import records as store
from escalade_bench.report import terminal as tables

_TWIN = torch.device("cpu")


def command(
    operation: Operation,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """What every rung asks of memory and of each unit, counted on the twin. Needs no GPU.

    Results are verified too. Without --problem: the first of the operation's small problems; without --dtype: the
    operation's first, and for a rung that does not take it the first that it takes.
    """
    console = Console()
    chosen = ops.operation(operation)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or tuple(chosen.small_problems[:1])
    found = verification.jobs(
        chosen,
        _TWIN,
        problems=problems,
        rungs=selection.rungs,
        dtypes=selection.dtypes,
        layouts=selection.layouts,
    )
    selection.require_work(found, "count")
    planned = found if selection.dtypes else _first_of_each_rung(found)
    compile_for(planned, _TWIN, console, counts=True)
    outcomes: list[verification.Outcome] = []
    with progress_bar(console) as progress:
        task = progress.add_task(f"counting {chosen.name}", total=len(planned))
        for outcome in verification.run(chosen, _TWIN, planned, seed, TwinOptions(counts=True)):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{chosen.name} {outcome.rung}")
    origin = store.provenance(_TWIN)
    records = [_record(chosen, each).stamped(origin) for each in outcomes if not each.refusal]
    for table in tables.count_tables(records):
        console.print(table)
    failures = [record for record in records if record.failure]
    for record in failures:
        console.print(f"[red]failed:[/] {escape(f'{record.rung} {record.dtype}: {record.failure}')}")
    if json:
        store.write(json, records)
    if results:
        for path in store.file_away(results, records):
            console.print(f"wrote {path}")
    if failures:
        raise typer.Exit(1)


def _first_of_each_rung(planned: list[verification.Job]) -> list[verification.Job]:
    """Every rung on each problem and layout, in the first dtype that it takes: the others differ in bytes alone."""
    kept: dict[tuple[str, str, str], verification.Job] = {}
    for job in planned:
        key = (job.problem.name, job.problem.layout, job.rung.name)
        if key not in kept or (kept[key].refusal and not job.refusal):
            kept[key] = job
    return sorted(kept.values(), key=planned.index)


def _record(operation: ops.Operation[Any], outcome: verification.Outcome) -> store.Record:
    problem: Any = outcome.problem
    return store.Record(
        f"{operation.name}_counts",
        problem.name,
        problem.dtype,
        problem.layout,
        problem.batch,
        "escalade",
        outcome.rung,
        config=asdict(outcome.config) if outcome.config else {},
        timing="twin",
        error=outcome.error,
        tolerance=outcome.tolerance,
        counts=outcome.counts.figures() if outcome.counts else {},
        failure=outcome.failure,
    )
