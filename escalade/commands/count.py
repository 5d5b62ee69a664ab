"""The command `count`: what rungs ask of memory and of each unit, as the twin counts it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

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
from escalade.commands.running import Run
from escalade.commands.selection import Selection
from escalade.device.run import TwinOptions
from escalade.tune import verification
from escalade_bench.measure.records import Record
from escalade_bench.report import terminal as tables
from escalade_bench.trial import blank_record

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
    """Count the memory traffic and unit usage of every rung on the twin. Needs no GPU.

    Results are verified too. Without --problem: the first of the operation's small problems; without --dtype: the
    operation's first, and for a rung that does not take it the first that it takes.
    """
    run, chosen = Run(_TWIN, json, results), ops.operation(operation)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or tuple(chosen.small_problems[:1])
    found = selection.jobs(chosen, _TWIN, problems)
    selection.require_work(found, "count")
    planned = found if selection.dtypes else _first_of_each_rung(found)
    compile_for(planned, _TWIN, run.console, counts=True)
    outcomes: list[verification.Outcome] = []
    with progress_bar(run.console) as progress:
        task = progress.add_task(f"counting {chosen.name}", total=len(planned))
        for outcome in verification.run(chosen, _TWIN, planned, seed, TwinOptions(counts=True)):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{chosen.name} {outcome.rung}")
    records = run.keep(_record(chosen, each) for each in outcomes if not each.refusal)
    run.show(tables.count_tables(records))
    run.end()


def _first_of_each_rung(planned: list[verification.VerificationJob]) -> list[verification.VerificationJob]:
    """Every rung on each problem and layout, in the first dtype that it takes: the others differ in bytes alone."""
    kept: dict[tuple[str, str, str], verification.VerificationJob] = {}
    for job in planned:
        key = (job.problem.name, job.problem.layout, job.rung.name)
        if key not in kept or (kept[key].refusal and not job.refusal):
            kept[key] = job
    return sorted(kept.values(), key=planned.index)


def _record(operation: ops.Operation[Any], outcome: verification.Outcome) -> Record:
    return replace(
        blank_record(operation, outcome.problem, "escalade", outcome.rung),
        workload=operation.name + tables.COUNTS,
        config=asdict(outcome.config) if outcome.config else {},
        timing="twin",
        error=outcome.error,
        tolerance=outcome.tolerance,
        counts=outcome.counts.figures() if outcome.counts else {},
        failure=outcome.failure,
    )
