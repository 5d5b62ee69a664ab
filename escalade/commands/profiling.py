"""Profile a target and print the result, for `escalade profile`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape

from escalade import ops
from escalade.commands.profiled import Asked, chosen, launch, target_of, works_of
from escalade.commands.progress import status
from escalade.device.precompilation import build_for_twin
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted
from escalade_bench.measure import ceilings, records
from escalade_bench.profile import climb, cupti, ncu, twin
from escalade_bench.profile.profiles import Profile, Profiled, profile
from escalade_bench.profile.target import work_of_rung
from escalade_bench.report import terminal


def profile_rungs(
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


def profile_on_gpu(
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


def count_on_twin(asked: Asked, console: Console) -> Profile:
    """Count each part on the twin."""
    title, works = works_of(asked)
    if not works:
        raise UnsupportedError(
            f"PyTorch computes all of {title}: there are no kernels of Escalade's to count"
        )
    programs = list(dict.fromkeys(program for work in works for program in work.recipe.programs))
    parts = []
    with status(console) as say:
        say(f"compiling {counted(len(programs), 'kernel')} for the twin")
        build_for_twin(programs, counts=True)
        for work in works:
            say(f"counting {work.part.name}")
            parts.append(twin.counted(work, asked.seed))
    for table in terminal.count_tables(twin.records(title, parts)):
        console.print(table)
    _show_words(parts, console)
    return Profile(title, "counted on the twin", parts, {})


def show_profile(found: Profile, console: Console) -> None:
    console.print(found.table())
    _show_words(found.parts, console)
    console.print(f"{counted(len(found.parts), 'part')}, {found.us:.1f} µs in total.", highlight=False)
    if line := terminal.conditions_line([found.conditions]):
        console.print(line, highlight=False)


def _show_words(parts: Sequence[Profiled], console: Console) -> None:
    for each in parts:
        if each.words:
            console.print(f"[bold]{escape(each.part.name)}[/] {escape(each.words)}", highlight=False)


def compare_with_twin(
    asked: Asked, device: torch.device, found: Profile, console: Console
) -> list[records.Record]:
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
