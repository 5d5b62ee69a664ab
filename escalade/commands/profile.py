"""The command `profile`: what kernels do, in counters and in words."""

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
from escalade.commands.options import InputSeed, KernelsOn, count, written
from escalade.commands.profiled import Asked, chosen, launch, target_of, works_of
from escalade.commands.progress import status
from escalade.device.precompilation import build_for_twin
from escalade.errors import UnsupportedError
from escalade.measure import ceilings, records
from escalade.profile import agreement, ncu, twin
from escalade.profile.climb import Climb
from escalade.profile.climb import measure as measure_climb
from escalade.profile.parts import Part
from escalade.profile.profiles import Profile, counted, profile
from escalade.profile.trace import REPEATS, traced
from escalade.report import terminal


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
        typer.Option("--problem", "-p", help="Of an operation: the problem, such as 64to64_56_k3s1_b256."),
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option(
            "--rung",
            "-r",
            help="Of an operation: the rung, or several such as direct,tuned. Without it: what a call would take.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8.", show_default=False)
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", "-l", help="Of an operation: nchw or nhwc.", show_default=False)
    ] = None,
    batch: Annotated[int, count("--batch", "-b", help="Of a network: the batch size.")] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="A step of training, of autoencoder or resnet18.")
    ] = False,
    device: KernelsOn = None,
    counters: Annotated[
        bool, typer.Option(help="Read the card's counters by Nsight Compute, if it is here.")
    ] = True,
    trace: Annotated[
        pathlib.Path | None,
        written("--trace", help="Write a trace of some runs to this file, for Perfetto."),
    ] = None,
    beside_twin: Annotated[
        bool,
        typer.Option("--beside-twin", help="Of a rung: count what the twin counts too, and show both."),
    ] = False,
    seed: InputSeed = 0,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Write the profile to this file too.")
    ] = None,
    results: Annotated[
        pathlib.Path | None,
        written(
            "--results",
            check=files.require_folder,
            help="File under this folder, in one of the GPU's name, the bytes that several rungs move; with "
            "--beside-twin the counts.",
        ),
    ] = None,
) -> None:
    """What the kernels of a rung, a network or a step of training do: counters or times, and what they say."""
    console = Console()
    where = kernel_device(device)
    if rung is not None and "," in rung:
        _climb(target, problem, rung, dtype, where, seed, json, results, console)
        return
    asked = Asked(target, problem, rung, dtype, layout, batch, training, where.type, seed)
    if beside_twin and (where.type != "cuda" or target not in ops.OPERATIONS or not counters):
        raise UnsupportedError(
            "--beside-twin compares ncu's counters of a rung with the twin's; it takes a GPU"
        )
    if results is not None and not beside_twin:
        raise UnsupportedError(
            "--results files what several rungs move, or counts that --beside-twin compares; of one rung there "
            "is --json"
        )
    if where.type != "cuda":
        if trace is not None:
            raise UnsupportedError(
                "--trace is of a GPU; on the twin kernels are counted, and times mean nothing"
            )
        _count(asked, console, json)
        return
    found = _counted(asked, where, console, beside_twin) if counters else None
    if beside_twin and found is None:
        raise UnsupportedError("without counters there is nothing to compare the twin's with")
    if found is None or trace is not None:
        timed = _timed(asked, where, trace, console)
        found = found or timed
    _show(found, console)
    if beside_twin:
        _compare(asked, where, found, results, console)
    if json:
        _write(console, json, found.to_json())


def _climb(
    target: str,
    problem: str | None,
    rungs: str,
    dtype: str | None,
    device: torch.device,
    seed: int,
    json: pathlib.Path | None,
    results: pathlib.Path | None,
    console: Console,
) -> None:
    """Several rungs in one run, and a record of what each moved."""
    if target not in ops.OPERATIONS or problem is None or device.type != "cuda":
        raise UnsupportedError(
            f"--rung {rungs}: several rungs are counted of an operation, on the problem that --problem names, by ncu "
            "on a GPU"
        )
    operation = ops.operation(target)
    asked = Climb(target, operation.parse(problem).name, dtype or operation.dtypes[0], rungs.split(","), seed)
    console.print("measuring the card's ceilings, then counting")
    found, made = measure_climb(asked, device, ceilings.measure(device))
    _show(found, console)
    if results is not None:
        for path in records.file_away(results, [r.stamped(records.provenance(device)) for r in made]):
            console.print(f"wrote {escape(str(path))}")
    if json:
        _write(console, json, found.to_json())


def _show(found: Profile, console: Console) -> None:
    console.print(found.table())
    _say_words(console, [(each.part, each.words) for each in found.parts])
    console.print(f"{len(found.parts)} parts take {found.us:.1f} µs together.", highlight=False)
    if line := terminal.conditions_line([found.conditions]):
        console.print(line, highlight=False)


def _count(asked: Asked, console: Console, json: pathlib.Path | None) -> None:
    """What the twin counts of each part."""
    title, works = works_of(asked)
    if not works:
        raise UnsupportedError(f"PyTorch does all of {title}: there are no kernels of Escalade's to count")
    programs = list(dict.fromkeys(program for work in works for program in work.recipe.programs))
    with status(console) as say:
        say(f"compiling {len(programs)} kernels for the twin")
        build_for_twin(programs, counts=True)
        parts = []
        for work in works:
            say(f"counting {work.part.name}")
            parts.append(twin.counted(work.part, work.count(asked.seed)))
    for table in terminal.count_tables(twin.records(title, parts)):
        console.print(table)
    _say_words(console, [(each.part, each.words) for each in parts])
    if json:
        _write(console, json, twin.to_json(title, parts))


def _say_words(console: Console, parts: Sequence[tuple[Part, str]]) -> None:
    for part, words in parts:
        if words:
            console.print(f"[bold]{escape(part.name)}[/] {escape(words)}", highlight=False)


def _write(console: Console, path: pathlib.Path, text: str) -> None:
    files.replace(path, (text + "\n").encode())
    console.print(f"wrote {escape(str(path))}")


def _counted(asked: Asked, device: torch.device, console: Console, like_twin: bool) -> Profile | None:
    """The profile by Nsight Compute; without it, or where it may not count, a word on why there is none."""
    program = ncu.find()
    if program is None:
        console.print("[yellow]ncu is not here, so there are times and no counters.[/]")
        return None
    console.print("counting, then measuring the card's ceilings")
    try:
        title, parts, readings = ncu.profiled(
            program, f"{launch.__module__}.{launch.__name__}", asked.to_json(), like_twin
        )
    except ncu.NoCounters as error:
        console.print(f"[yellow]There are times and no counters: {escape(str(error))}[/]")
        return None
    return counted(title, parts, readings, ceilings.measure(device))


def _compare(
    asked: Asked, device: torch.device, found: Profile, results: pathlib.Path | None, console: Console
) -> None:
    """The counts of a rung's one call by both, and a record of the card's."""
    choice = chosen(asked, device)
    (work,) = twin.of_rung(ops.operation(asked.target), choice)
    (part,) = found.parts
    card = agreement.summed(part.kernels)
    both = agreement.pairs(card, work.count(asked.seed).figures())
    console.print(agreement.table(both))
    console.print(agreement.said(both), highlight=False)
    if results is None:
        return
    problem = choice.problem
    record = records.Record(
        f"{asked.target}_counts", problem.name, problem.dtype, problem.layout, problem.batch, "escalade",
        choice.rung.name, config=choice.config.as_dict(), timing="ncu", counts=card, note=agreement.said(both),
    )  # fmt: skip
    for path in records.file_away(results, [record.stamped(records.provenance(device))]):
        console.print(f"wrote {escape(str(path))}")


def _timed(asked: Asked, device: torch.device, trace: pathlib.Path | None, console: Console) -> Profile:
    made = target_of(asked)
    parts, kernels = traced(made, trace)
    if trace is not None:
        console.print(f"wrote {escape(str(trace))}")
    how = f"times by CUPTI, medians of {REPEATS} runs over warm caches"
    return profile(made.title, how, parts, kernels, ceilings.measure(device))
