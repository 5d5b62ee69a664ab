"""`escalade measure`: run the units of the campaign that are missing or stale, within a time budget."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Units: `headline` (the default: README and the main tables), `all`, names, beginnings of names, or "
            "patterns such as network/*/fp16.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Time budget, such as 540, 9m or 1h: no unit is started that would exceed it."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure current units too, and all peers.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure nothing. Report which units are missing or no longer current; fail if any is.",
        ),
    ] = False,
    mark: Annotated[
        bool,
        typer.Option(
            "--mark", help="Measure nothing. Mark the records that are no longer current as older code."
        ),
    ] = False,
    list_units: Annotated[
        bool, typer.Option("--list", help="Measure nothing. List the units with their commands.")
    ] = False,
    results: Annotated[pathlib.Path, typer.Option(help="Folder of the records.")] = pathlib.Path("results"),
    gpu: Annotated[
        str | None,
        typer.Option(help="Folder of the card for --check, --mark and --list."),
    ] = None,
) -> None:
    """Re-run benchmarks that are missing or no longer current, within a time budget.

    A figure is current while its plan and machine code equal those that would run today. Records are saved immediately,
    so a run that was stopped by its budget or by Ctrl-C can be resumed. A peer is only measured again with another
    driver, PyTorch, CUDA or cuDNN. --check needs no GPU.
    """
    import torch

    from escalade.commands.campaigns import (
        card_folder,
        mark_older,
        measure_units,
        parse_budget,
        print_stale,
        print_summary,
    )
    from escalade.device import cuda
    from escalade.ops.base.card import H200
    from escalade_bench.campaign import registry
    from escalade_bench.campaign.runner import ordered
    from escalade_bench.campaign.staleness import Check
    from escalade_bench.campaign.units import Session
    from escalade_bench.measure import records as store

    console = Console(soft_wrap=True)
    chosen = registry.named(tuple(names or ()))
    limit = parse_budget(budget)
    if list_units:
        for unit in chosen:
            console.print(f"[bold]{escape(unit.name)}[/]: {escape(unit.what)}\n    {escape(unit.command)}")
        console.print(f"{counted(len(chosen), 'unit')}")
        return
    here = torch.cuda.is_available()
    folder = gpu or card_folder(here)
    known = store.load_folder(results).get(folder, [])
    origin = store.provenance(torch.device("cuda", 0)) if here and gpu is None else None
    architecture = cuda.architecture(0) if here and gpu is None else H200.architecture
    assert architecture is not None
    found = Check(Session(torch.device("cpu")), architecture, origin, again).states(chosen, known)
    if mark:
        mark_older(found, known, results, console)
        return
    if check:
        print_stale(found, console)
        raise typer.Exit(1 if any(state.stale for state in found) else 0)
    if not here:
        raise UnsupportedError(
            "measuring needs a GPU, and there is none; --check, --mark and --list need none"
        )
    print_summary(found, console)
    measure_units(ordered(found), architecture, limit, results, console)
