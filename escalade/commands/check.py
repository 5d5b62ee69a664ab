"""`escalade bench check`: time a network's plan against PyTorch on this GPU."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from escalade.commands.options import Model, PlannedBatch, PlannedDtype, written
from escalade.commands.progress import waiting, write_text


def command(
    model: Model,
    batch: PlannedBatch = 1,
    dtype: PlannedDtype = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="First choose the faster of kernel and PyTorch for every step, and save the choices.",
        ),
    ] = False,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Also write the comparison to this file.")
    ] = None,
) -> None:
    """Time a network's plan against PyTorch, per step and in total. Fails if PyTorch is faster. Needs a GPU."""
    from escalade.commands.networks import network
    from escalade.commands.selection import require_gpu

    console = Console()
    require_gpu("check times plans on a GPU")
    with waiting(f"compiling {model}"):
        engine, inputs = network(model, batch, dtype, "cuda", measured=measured)
    comparison = replace(engine.compare(*inputs), title=model)
    console.print(comparison)
    if json:
        write_text(json, comparison.to_json() + "\n", console)
    if comparison.speedup < 1:
        raise typer.Exit(1)
