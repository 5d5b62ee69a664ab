"""`escalade cache precompile`: compile kernels into the cache without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade.commands.options import Dtypes, Layouts, Operation, Problems, Rungs, count
from escalade.device.architecture import ALL_ARCHITECTURES, HOPPER


def command(
    operation: Operation,
    arch: Annotated[str, typer.Option(help="GPU architecture; sm_90a is H100 and H200.")] = HOPPER.name,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    tune: Annotated[bool, typer.Option(help="Compile every config, for `ladder --tune`.")] = False,
    workers: Annotated[
        int | None, count("--workers", help="Processes. Default: one per core.", show_default=False)
    ] = None,
) -> None:
    """Compile the kernels of an operation into the cache, in parallel. Needs no GPU."""
    import torch

    from escalade import ops
    from escalade.commands.compiling import compile_all
    from escalade.commands.selection import Selection, check_names
    from escalade.ops.base.cards import typical_card

    console = Console()
    check_names("architecture", (arch,), ALL_ARCHITECTURES)
    chosen = ops.operation(operation)
    selection = Selection.of(problem, rung, dtype, layout)
    problems = selection.parsed(chosen) or (
        *chosen.small_problems, *chosen.problems, *chosen.crossover,
    )  # fmt: skip
    planned = selection.jobs(chosen, torch.device("cpu"), problems, tune, typical_card(arch))
    selection.require_work(planned, "compile")
    failures = compile_all(planned, arch, workers, console)
    for failure in failures:
        console.print(f"[red]failed:[/] {escape(failure.message)}")
    if failures:
        raise typer.Exit(1)
