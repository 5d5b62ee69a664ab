"""`escalade profile`: counters or times of kernels, and a diagnosis."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from escalade.commands.options import InputSeed, KernelsOn, RecordsFolder, count, written
from escalade.commands.progress import write_text
from escalade.errors import UnsupportedError


def command(
    target: Annotated[
        str,
        typer.Argument(
            help="An operation such as conv2d, or a network: resnet18, MODULE:name, timm:name, a .pt2 or .onnx file, "
            "a folder with config.json, a saved engine.",
            show_default=False,
        ),
    ],
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            "-p",
            help="Problem of an operation, such as 64to64_56_k3s1_b256.",
            show_default="the operation's first",
        ),
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option(
            "--rung",
            "-r",
            help="Rung of an operation, or several: direct,tuned.",
            show_default="that of a call",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", "-t", help="fp32, tf32, fp16, bf16, int8 or fp8.", show_default="fp16 if supported"
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", "-l", help="Layout of an operation: nchw or nhwc.", show_default="nhwc if supported"
        ),
    ] = None,
    batch: Annotated[int, count("--batch", "-b", help="Batch size of a network.")] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="Profile a training step of autoencoder or resnet18.")
    ] = False,
    device: KernelsOn = None,
    counters: Annotated[
        bool, typer.Option(help="Read the card's counters with Nsight Compute, if it is installed.")
    ] = True,
    trace: Annotated[
        pathlib.Path | None,
        written("--trace", help="Write a trace for Perfetto to this file."),
    ] = None,
    beside_twin: Annotated[
        bool,
        typer.Option("--beside-twin", help="Compare the counts of a rung with the twin's."),
    ] = False,
    seed: InputSeed = 0,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Also write the profile to this file.")
    ] = None,
    results: RecordsFolder = None,
) -> None:
    """Profile the kernels of a rung, a network or a training step: counters or times, and a diagnosis."""
    from escalade import ops
    from escalade.commands.profiling import (
        Asked,
        compare_with_twin,
        count_on_twin,
        profile_on_gpu,
        profile_rungs,
        show_profile,
    )
    from escalade.commands.running import Run
    from escalade.commands.selection import kernel_device

    console = Console()
    where = kernel_device(device)
    on_gpu, several = where.type == "cuda", rung is not None and "," in rung
    if beside_twin and (several or not on_gpu or target not in ops.OPERATIONS or not counters):
        raise UnsupportedError(
            "--beside-twin compares ncu's counters of one rung with the twin's; it needs a GPU and counters"
        )
    if results is not None and not beside_twin and not several:
        raise UnsupportedError(
            "--results files the bytes of several rungs or the counts of --beside-twin; use --json for one rung"
        )
    if trace is not None and not on_gpu:
        raise UnsupportedError("--trace needs a GPU; the twin counts kernels, and its times mean nothing")
    if several:
        found, made = profile_rungs(target, problem, rung or "", dtype, where, seed, console)
        show_profile(found, console)
        Run(where, results=results, console=console).keep(made)
    else:
        asked = Asked(target, problem, rung, dtype, layout, batch, training, where.type, seed)
        if on_gpu:
            found = profile_on_gpu(asked, where, counters, beside_twin, trace, console)
            show_profile(found, console)
        else:
            found = count_on_twin(asked, console)
        if beside_twin:
            Run(where, results=results, console=console).keep(compare_with_twin(asked, where, found, console))
    if json:
        write_text(json, found.to_json() + "\n", console)
