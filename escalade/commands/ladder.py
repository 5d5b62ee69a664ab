"""`escalade ladder`: rungs are verified, then timed together with their peers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from escalade.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def command(
    operation: Operation,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: KernelsOn = None,
    tune: Annotated[bool, typer.Option(help="Time every config of every rung, and keep the best.")] = False,
    ablate: Annotated[
        bool, typer.Option(help="Also time rungs with one optimization off at a time.")
    ] = False,
    crossover: Annotated[
        bool, typer.Option(help="Measure the sweep over filter sizes instead of the usual problems.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option(help="Also time torch.compile in max-autotune: seconds and more per problem.")
    ] = False,
    seconds: Annotated[float, duration("Seconds to time each rung.")] = 0.3,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Verify the rungs of an operation, then time them against PyTorch and the card's ceilings."""
    from escalade import ops
    from escalade.commands.compiling import announce_jobs, compile_for
    from escalade.commands.running import Run
    from escalade.commands.selection import Selection, kernel_device
    from escalade.ops.base.card import Card
    from escalade.tune import verification
    from escalade_bench import ladder as climbing
    from escalade_bench.campaign.units import Session
    from escalade_bench.report import terminal

    chosen, where = ops.operation(operation), kernel_device(device)
    run = Run(where, json, results)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or _usual_problems(chosen, where, crossover)
    dtypes, layouts, rungs = selection.dtypes, selection.layouts, selection.rungs
    if where.type != "cuda":
        dtypes = dtypes or chosen.dtypes[:1]  # g++ compiles every rung for every dtype first
        run.console.print(
            f"On the twin, in {', '.join(dtypes)}: results are checked, and wall-clock seconds of the CPU "
            "shown; [yellow]they are not speeds.[/]"
        )
    planned = replace(selection, dtypes=dtypes).jobs(chosen, where, problems, tune)
    selection.require_work(planned, "measure")
    if ablate:
        variants = [one for group in climbing.ablations(chosen).values() for one in group.values()]
        for each, in_dtype, in_layout, one in product(
            problems, dtypes or chosen.dtypes, layouts or chosen.layouts, variants
        ):
            asked = replace(each, dtype=in_dtype, layout=in_layout)
            planned += verification.rung_jobs(one, asked, Card.of(where), "all" if tune else "default")
    announce_jobs(planned, where, run.console)
    compile_for(planned, where, run.console)
    session = Session(where, seconds, seed, run.measure_ceilings())
    for each in problems:
        with status(run.console) as say:
            settings = session.settings(
                say, *dtypes, layouts=layouts, rungs=rungs, tune=tune, compiled=compiled
            )
            found = climbing.climb(chosen, each, settings)
            if crossover:
                found = [replace(record, workload=f"{chosen.name}_crossover") for record in found]
            if ablate:
                found += climbing.ablate(chosen, each, settings)
        records = run.keep(found)
        run.show(terminal.ladder_tables(records), records)
        for record in records:
            if record.note and not record.failure and record.timing != "twin":
                run.note(terminal.remark(record))
    run.end()


def _usual_problems(operation: Any, device: torch.device, crossover: bool) -> tuple[Any, ...]:
    if crossover and not operation.crossover:
        raise UnsupportedError(f"{operation.name} has no crossover sweep; leave --crossover out")
    if crossover:
        return tuple(operation.crossover)
    return tuple(operation.problems if device.type == "cuda" else operation.small_problems[:1])
