"""`escalade explain`: show the plan of a network."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.options import EngineOn, Model, PlannedBatch, written
from escalade.commands.progress import waiting, write_text
from escalade.errors import UnsupportedError


def command(
    model: Model,
    batch: PlannedBatch = 1,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16, int8 or fp8.", show_default="fp16"),
    ] = None,
    device: EngineOn = None,
    time: Annotated[bool, typer.Option("--time", help="Time each step separately on the GPU.")] = False,
    json: Annotated[pathlib.Path | None, written("--json", help="Also write the plan to this file.")] = None,
    results: Annotated[
        pathlib.Path | None,
        written(
            "--results",
            check=files.require_writable_folder,
            help="With --time and a model by name: file the steps in this folder, under the name of the GPU.",
        ),
    ] = None,
) -> None:
    """Show the plan of a network: each step, its kernel and why it was chosen, its lower bound, and fallbacks."""
    from escalade import models
    from escalade.commands.networks import network
    from escalade.commands.selection import engine_device
    from escalade_bench.measure import ceilings, records
    from escalade_bench.networks.plans import step_records, timed_plan
    from escalade_bench.report import terminal

    console = Console()
    where = engine_device(device)
    if time and where != "cuda":
        raise UnsupportedError(f"--time measures on a GPU, and the device is {where}")
    if results and not (time and model in models.MODELS):
        raise UnsupportedError(
            f"--results records times of a model: it needs --time and one of {', '.join(models.MODELS)}"
        )
    with waiting(f"compiling {model} for {where}"):
        engine, inputs = network(model, batch, dtype, where)
    if time:
        console.print("measuring the card's ceilings, then the steps")
        explanation = timed_plan(engine, inputs, ceilings.measure(engine.device))
    else:
        explanation = engine.explain(*inputs)
    explanation = replace(explanation, title=model)
    console.print(explanation)
    if line := terminal.conditions_line([explanation.conditions]):
        console.print(line, highlight=False)
    if json:
        write_text(json, explanation.to_json() + "\n", console)
    if results:
        origin = records.provenance(engine.device)
        for path in records.file_away(results, [r.stamped(origin) for r in step_records(explanation)]):
            console.print(f"wrote {escape(str(path))}")
