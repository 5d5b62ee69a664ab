"""`escalade verify`: every rung on every problem, against the reference."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from escalade.commands.options import Dtypes, KernelsOn, Layouts, Problems, Rungs, seed_option
from escalade.commands.progress import progress_bar
from escalade.device.twin import Order


def command(
    operation: Annotated[
        str | None, typer.Argument(help="Without it: all operations.", show_default=False)
    ] = None,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: KernelsOn = None,
    all_configs: Annotated[
        bool, typer.Option(help="Every config of every rung, not only the default.")
    ] = False,
    checks: Annotated[
        bool, typer.Option(help="On the twin: check every memory access, races and overruns.")
    ] = False,
    order: Annotated[int, seed_option("On the twin: shuffle threads and blocks by this seed.")] = 0,
    late: Annotated[
        bool, typer.Option(help="On the twin: asynchronous operations as late as allowed.")
    ] = False,
    seed: Annotated[
        int | None,
        seed_option("Seed of the random inputs.", show_default="a new one each time"),
    ] = None,
) -> None:
    """Compare every rung on every problem with the float64 reference. Fails if a result is wrong."""
    from escalade import ops
    from escalade.commands.compiling import announce_jobs, compile_for
    from escalade.commands.selection import Selection, kernel_device
    from escalade.device.run import TwinOptions
    from escalade.tune import verification
    from escalade_bench.report import terminal

    console = Console()
    where = kernel_device(device)
    drawn = secrets.randbelow(2**31) if seed is None else seed
    twin = TwinOptions(Order(order, late), checks)
    selection = Selection.of(problem, rung, dtype, layout)
    asked = [ops.operation(operation)] if operation else list(ops.OPERATIONS.values())
    work = {
        each: selection.jobs(each, where, problems or None, all_configs)
        for name, problems in selection.parsed_by(asked).items()
        if (each := ops.operation(name))
    }
    selection.require_work([job for planned in work.values() for job in planned], "verify")
    announce_jobs([job for planned in work.values() for job in planned], where, console, checks)
    failed = 0
    for each, planned in work.items():
        compile_for(planned, where, console, checks)
        outcomes = []
        with progress_bar(console, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
            task = progress.add_task(f"verifying {each.name}", total=len(planned))
            for outcome in verification.run(each, where, planned, drawn, twin):
                outcomes.append(outcome)
                progress.update(task, advance=1, description=f"{each.name} {outcome.rung}")
                if outcome.failed:
                    progress.console.print(f"[red]wrong:[/] {escape(f'{outcome.label}: {outcome.failure}')}")
        console.print(terminal.verify_table(each, outcomes))
        failed += sum(outcome.failed for outcome in outcomes)
    console.print(f"seed {drawn}: " + ("[red]" + f"{failed} wrong[/]" if failed else "[green]all right[/]"))
    if failed:
        raise typer.Exit(1)
