"""The command `profile`: counters or times of kernels, and a diagnosis."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import files, ops
from escalade.commands.devices import kernel_device
from escalade.commands.options import InputSeed, KernelsOn, RecordsFolder, count, written
from escalade.commands.profiled import Asked, chosen, launch, target_of, works_of
from escalade.commands.progress import status
from escalade.commands.running import Run
from escalade.device.precompilation import build_for_twin
from escalade.errors import UnsupportedError
from escalade_bench.measure import ceilings, records
from escalade_bench.profile import climb, cupti, ncu, twin
from escalade_bench.profile.profiles import Profile, Profiled, profile
from escalade_bench.profile.target import work_of_rung
from escalade_bench.report import terminal


def command(
    target: Annotated[
        str,
        typer.Argument(
            help="An operation such as conv2d, or a network: resnet18, MODULE:name, a .pt2 file, a saved engine.",
            show_default=False,
        ),
    ],
    problem: Annotated[
        str | None,
        typer.Option("--problem", "-p", help="Problem of an operation, such as 64to64_56_k3s1_b256."),
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option(
            "--rung", "-r", help="Rung of an operation, or several: direct,tuned. Default: that of a call."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8.", show_default=False)
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", "-l", help="Layout of an operation: nchw or nhwc.", show_default=False),
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
        found, made = _climb(target, problem, rung or "", dtype, where, seed, console)
        _show(found, console)
        Run(where, results=results, console=console).keep(made)
    else:
        asked = Asked(target, problem, rung, dtype, layout, batch, training, where.type, seed)
        if on_gpu:
            found = _profile(asked, where, counters, beside_twin, trace, console)
            _show(found, console)
        else:
            found = _count(asked, console)
        if beside_twin:
            Run(where, results=results, console=console).keep(_compare(asked, where, found, console))
    if json:
        files.replace(json, (found.to_json() + "\n").encode())
        console.print(f"wrote {escape(str(json))}")


def _climb(
    target: str, problem: str | None, rungs: str, dtype: str | None, device: torch.device, seed: int,
    console: Console,
) -> tuple[Profile, list[records.Record]]:  # fmt: skip
    """Count several rungs in one run, with a record of each."""
    if target not in ops.OPERATIONS or problem is None or device.type != "cuda":
        raise UnsupportedError(
            f"--rung {rungs}: several rungs need an operation, a --problem, and ncu on a GPU"
        )
    operation = ops.operation(target)
    name, dtype = operation.parse(problem).name, dtype or operation.dtypes[0]
    console.print("measuring the card's ceilings, then counting")
    asked = climb.Climb(target, name, dtype, rungs.split(","), seed)
    return climb.measure(asked, device, ceilings.measure(device))


def _profile(
    asked: Asked, device: torch.device, counters: bool, like_twin: bool, trace: pathlib.Path | None,
    console: Console,
) -> Profile:  # fmt: skip
    """Profile with ncu; without its counters or for a trace, with CUPTI."""
    found = None
    program = ncu.find() if counters else None
    if program is not None:
        console.print("counting, then measuring the card's ceilings")
        try:
            title, parts, launches = ncu.profiled(program, launch, asked.to_json(), like_twin)
            found = profile(title, ncu.HOW, parts, launches, ceilings.measure(device))
        except ncu.NoCounters as error:
            console.print(f"[yellow]There are times and no counters: {escape(str(error))}[/]")
    elif counters:
        console.print("[yellow]ncu is not installed, so there are times and no counters.[/]")
    if like_twin and found is None:
        raise UnsupportedError("without counters there is nothing to compare with the twin")
    if found is None or trace is not None:
        made = target_of(asked)
        parts, launches = cupti.traced(made, trace)
        if trace is not None:
            console.print(f"wrote {escape(str(trace))}")
        found = found or profile(made.title, cupti.HOW, parts, launches, ceilings.measure(device))
    return found


def _count(asked: Asked, console: Console) -> Profile:
    """Count each part on the twin."""
    title, works = works_of(asked)
    if not works:
        raise UnsupportedError(
            f"PyTorch computes all of {title}: there are no kernels of Escalade's to count"
        )
    programs = list(dict.fromkeys(program for work in works for program in work.recipe.programs))
    parts = []
    with status(console) as say:
        say(f"compiling {len(programs)} kernels for the twin")
        build_for_twin(programs, counts=True)
        for work in works:
            say(f"counting {work.part.name}")
            parts.append(twin.counted(work, asked.seed))
    for table in terminal.count_tables(twin.records(title, parts)):
        console.print(table)
    _show_words(parts, console)
    return Profile(title, "counted on the twin", parts, {})


def _show(found: Profile, console: Console) -> None:
    console.print(found.table())
    _show_words(found.parts, console)
    console.print(f"{len(found.parts)} parts take {found.us:.1f} µs together.", highlight=False)
    if line := terminal.conditions_line([found.conditions]):
        console.print(line, highlight=False)


def _show_words(parts: Sequence[Profiled], console: Console) -> None:
    for each in parts:
        if each.words:
            console.print(f"[bold]{escape(each.part.name)}[/] {escape(each.words)}", highlight=False)


def _compare(asked: Asked, device: torch.device, found: Profile, console: Console) -> list[records.Record]:
    """Compare the counts of one call with the twin's; return a record of the card's."""
    choice = chosen(asked, device)
    card = twin.summed(found.parts[0].kernels)
    counts = twin.count(work_of_rung(ops.operation(asked.target), choice), asked.seed).figures()
    note = twin.agreement(twin.differences(card, counts))
    console.print(twin.agreement_table(card, counts))
    console.print(note, highlight=False)
    p, config = choice.problem, choice.config.as_dict()
    return [
        records.Record(
            f"{asked.target}_counts", p.name, p.dtype, p.layout, p.batch, "escalade", choice.rung.name,
            config=config, timing="ncu", counts=card, note=note,
        )
    ]  # fmt: skip
