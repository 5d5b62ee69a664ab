"""The command `profile`: what kernels do, in counters and in words."""

from __future__ import annotations

import pathlib
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.devices import kernel_device
from escalade.commands.options import InputSeed, KernelsOn
from escalade.commands.profiled import Asked, launch, target_of
from escalade.errors import UnsupportedError
from escalade.measure import ceilings
from escalade.profile import ncu
from escalade.profile.profiles import Profile, counted, profile
from escalade.profile.trace import REPEATS, traced
from escalade.report import terminal


def command(
    target: Annotated[
        str,
        typer.Argument(
            help="An operation such as conv2d, a network such as resnet18, or the file of a saved engine.",
            show_default=False,
        ),
    ],
    problem: Annotated[
        str | None,
        typer.Option("--problem", "-p", help="Of an operation: the problem, such as 64to64_56_k3s1_b256."),
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option("--rung", "-r", help="Of an operation: the rung. Without it: what a call would take."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8.", show_default=False)
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", "-l", help="Of an operation: nchw or nhwc.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Of a network: the batch size.")] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="A step of training, of autoencoder or resnet18.")
    ] = False,
    device: KernelsOn = None,
    counters: Annotated[
        bool, typer.Option(help="Read the card's counters by Nsight Compute, if it is here.")
    ] = True,
    trace: Annotated[
        pathlib.Path | None, typer.Option(help="Write a trace of some runs to this file, for Perfetto.")
    ] = None,
    seed: InputSeed = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the profile to this file too.")] = None,
) -> None:
    """What the kernels of a rung, a network or a step of training do: counters or times, and what they say."""
    console = Console()
    where = kernel_device(device)
    if where.type != "cuda":
        raise UnsupportedError(
            "profile reads a GPU's counters and times, and there is none here; "
            "`escalade count` has the twin count what rungs do"
        )
    asked = Asked(target, problem, rung, dtype, layout, batch, training, where.type, seed)
    found = _counted(asked, where, console) if counters else None
    if found is None or trace is not None:
        timed = _timed(asked, where, trace, console)
        found = found or timed
    console.print(found.table())
    for each in found.parts:
        if each.words:
            console.print(f"[bold]{escape(each.part.name)}[/] {escape(each.words)}", highlight=False)
    console.print(f"{len(found.parts)} parts take {found.us:.1f} µs together.", highlight=False)
    if line := terminal.conditions_line([found.conditions]):
        console.print(line, highlight=False)
    if json:
        files.replace(json, (found.to_json() + "\n").encode())
        console.print(f"wrote {escape(str(json))}")


def _counted(asked: Asked, device: torch.device, console: Console) -> Profile | None:
    """The profile by Nsight Compute; without it, or where it may not count, a word on why there is none."""
    program = ncu.find()
    if program is None:
        console.print("[yellow]ncu is not here, so there are times and no counters.[/]")
        return None
    console.print("counting, then measuring the card's ceilings")
    try:
        title, parts, readings = ncu.profiled(
            program, f"{launch.__module__}.{launch.__name__}", asked.to_json()
        )
    except ncu.NoCounters as error:
        console.print(f"[yellow]There are times and no counters: {escape(str(error))}[/]")
        return None
    return counted(title, parts, readings, ceilings.measure(device))


def _timed(asked: Asked, device: torch.device, trace: pathlib.Path | None, console: Console) -> Profile:
    made = target_of(asked)
    parts, kernels = traced(made, trace)
    if trace is not None:
        console.print(f"wrote {escape(str(trace))}")
    how = f"times by CUPTI, medians of {REPEATS} runs over warm caches"
    return profile(made.title, how, parts, kernels, ceilings.measure(device))
