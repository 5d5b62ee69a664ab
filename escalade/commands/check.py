"""`escalade bench check`: time a network's plan against PyTorch on this GPU."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.options import Model, PlannedBatch, written
from escalade.commands.progress import waiting
from escalade.errors import UnsupportedError


def command(
    model: Model,
    batch: PlannedBatch = 1,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", "-t", help="fp32, tf32, fp16 or bf16.", show_default="fp16"),
    ] = None,
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
    import torch

    from escalade.commands.networks import network

    console = Console()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "check times plans on a GPU, and PyTorch finds none; `escalade doctor` reports why"
        )
    with waiting(f"compiling {model}"):
        engine, inputs = network(model, batch, dtype, "cuda", measured=measured)
    comparison = replace(engine.compare(*inputs), title=model)
    console.print(comparison)
    if json:
        files.replace(json, (comparison.to_json() + "\n").encode())
        console.print(f"wrote {escape(str(json))}")
    if comparison.speedup < 1:
        raise typer.Exit(1)
