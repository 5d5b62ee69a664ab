"""The command `check`: a network's plan beside PyTorch on this GPU, to read."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.networks import Model, PlannedBatch, network
from escalade.commands.options import written
from escalade.commands.progress import waiting
from escalade.errors import UnsupportedError


def command(
    model: Model,
    batch: PlannedBatch = 1,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", "-t", help="fp32, tf32, fp16 (the default) or bf16.", show_default=False),
    ] = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measured", help="Keep the faster of kernel and PyTorch for every step first, and remember it."
        ),
    ] = False,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Write the comparison to this file too.")
    ] = None,
) -> None:
    """A network's plan beside PyTorch, step by step and as a whole. Fails if PyTorch is faster; needs a GPU."""
    console = Console()
    if not torch.cuda.is_available():
        raise UnsupportedError("check times a plan beside PyTorch on a GPU, and there is none here")
    with waiting(f"compiling {model}"):
        engine, inputs = network(model, batch, dtype, "cuda", measured=measured)
    comparison = replace(engine.compare(*inputs), title=model)
    console.print(comparison)
    if json:
        files.replace(json, (comparison.to_json() + "\n").encode())
        console.print(f"wrote {escape(str(json))}")
    if comparison.speedup < 1:
        raise typer.Exit(1)
