"""`escalade profile count`: memory traffic and unit usage of rungs, counted by the twin."""

from __future__ import annotations

from dataclasses import asdict, replace

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
    operation's first, or the first that a rung supports.
    """
    import torch

    from escalade import ops
    from escalade.commands.compiling import announce_jobs, compile_for
    from escalade.commands.running import Run
    from escalade.commands.selection import Selection, first_of_each_rung
    from escalade.device.run import TwinOptions
    from escalade.tune import verification
    from escalade_bench.report import terminal as tables
    from escalade_bench.trial import blank_record

    twin = torch.device("cpu")
    run, chosen = Run(twin, json, results), ops.operation(operation)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or tuple(chosen.small_problems[:1])
    found = selection.jobs(chosen, twin, problems)
    selection.require_work(found, "count")
    planned = found if selection.dtypes else first_of_each_rung(found)
    announce_jobs(planned, twin, run.console, counts=True)
    compile_for(planned, twin, run.console, counts=True)
    outcomes: list[verification.Outcome] = []
    with progress_bar(run.console) as progress:
        task = progress.add_task(f"counting {chosen.name}", total=len(planned))
        for outcome in verification.run(chosen, twin, planned, seed, TwinOptions(counts=True)):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{chosen.name} {outcome.rung}")
    records = run.keep(
        replace(
            blank_record(chosen, outcome.problem, "escalade", outcome.rung),
            workload=chosen.name + tables.COUNTS,
            config=asdict(outcome.config) if outcome.config else {},
            timing="twin",
            error=outcome.error,
            tolerance=outcome.tolerance,
            counts=outcome.counts.figures() if outcome.counts else {},
            failure=outcome.failure,
        )
        for outcome in outcomes
        if not outcome.refusal
    )
    run.show(tables.count_tables(records))
    run.end()
