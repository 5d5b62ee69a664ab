"""The network that a command is about: a model by name with random weights, or the engine of a file."""

from __future__ import annotations

import math
import pathlib
from typing import Annotated

import torch
import typer

from escalade import models
from escalade.commands.options import count
from escalade.device import room
from escalade.engine import compile, load
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import fixed
from escalade.errors import UnsupportedError

Model = Annotated[
    str,
    typer.Argument(help="A model such as resnet18, or the file of a saved engine.", show_default=False),
]

PlannedBatch = Annotated[int, count("--batch", "-b", help="The batch size to plan for.")]


def network(
    name: str, batch: int, dtype: str | None, device: str, *, measured: bool = False
) -> tuple[Engine, tuple[torch.Tensor, ...]]:
    """A network of that name with random weights, or the engine of a file."""
    home = torch.device("cpu" if device == "twin" else device)
    if name in models.MODELS:
        item = math.prod(models.MODELS[name].item) * torch.float32.itemsize
        room.require(batch * item, f"{name} for a batch of {batch:,}")
        model, _ = models.model(name)
        x = models.example(name, batch).to(home)
        dtype = dtype or "fp16"
        calibration = [x] if dtype == "fp8" else None
        engine = compile(model, x, dtype=dtype, device=device, calibration=calibration, measured=measured)
        return engine, (x,)
    if not pathlib.Path(name).is_file():
        raise UnsupportedError(
            f"{name!r} is neither a model ({', '.join(models.MODELS)}) nor the file of a saved engine"
        )
    engine = load(name, device=device, measured=measured)
    if dtype not in (None, engine.dtype):
        raise UnsupportedError(f"{name} was compiled for {engine.dtype}; for {dtype} compile its model again")
    needed = sum(math.prod(fixed(given.shape, batch)) for given in engine.graph.inputs)
    room.require(needed, f"{name} for a batch of {batch:,}")
    inputs = tuple(
        torch.zeros(fixed(given.shape, batch), dtype=getattr(torch, given.dtype), device=home)
        for given in engine.graph.inputs
    )
    return engine, inputs
