"""Profile a rung, a network or a training step, and print the result, for `escalade profile`."""

from __future__ import annotations

import json
import pathlib
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from escalade import ops, parsing
from escalade.commands.networks import KINDS, is_network, network
from escalade.commands.progress import status
from escalade.commands.selection import check_names
from escalade.device.precompilation import build_for_twin
from escalade.engine import training_step
from escalade.engine.comparison import copy_inputs
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.training.program import KernelStep
from escalade.engine.training.step import TrainingStep
from escalade.errors import UnsupportedError
from escalade.ops.choose.choice import Choice
from escalade.ops.choose.pytorch import PYTORCH
from escalade.terminal_text import counted
from escalade_apps.train.data import synthetic
from escalade_apps.train.steps import optimizer_of
from escalade_apps.train.tasks import TASKS, task_of
from escalade_apps.train.tasks import settings as settings_of
from escalade_bench.measure import ceilings, records
from escalade_bench.profile import climb, ncu
from escalade_bench.profile.climb import first_choice
from escalade_bench.profile.counters import agreement, agreement_table, differences, summed
from escalade_bench.profile.profiles import Profile, profile
from escalade_bench.profile.profiles import counted as counted_on_twin
from escalade_bench.profile.target import Target, Work, of_plan, of_rung, work_of_plan, work_of_rung
from escalade_bench.report import terminal


@dataclass(frozen=True)
class Asked:
    """A target as named on the command line; None is the default."""

    target: str
    problem: str | None
    rung: str | None
    dtype: str | None
    layout: str | None
    batch: int
    training: bool
    device: str
    """`cuda`, or `cpu` for the twin."""
    seed: int

    def __post_init__(self) -> None:
        of_ladder = {"--problem": self.problem, "--rung": self.rung, "--layout": self.layout}
        given = [option for option, value in of_ladder.items() if value is not None]
        if self.batch < 1:
            raise UnsupportedError(f"batch size {self.batch}: it must be at least 1")
        if self.training and self.target not in TASKS:
            raise UnsupportedError(f"--training supports {', '.join(TASKS)}")
        if given and self.target not in ops.OPERATIONS:
            raise UnsupportedError(
                f"{', '.join(given)}: only for operations, and {self.target} is not one; known: "
                f"{', '.join(ops.OPERATIONS)}"
            )
        if self.target not in ops.OPERATIONS and not self.training and not is_network(self.target):
            raise UnsupportedError(
                f"{self.target!r} is neither an operation ({', '.join(ops.OPERATIONS)}), {KINDS}"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def chosen(asked: Asked, device: torch.device) -> Choice:
    """Choose the rung, and the first requested dtype and layout that it supports."""
    operation = ops.operation(asked.target)
    defaults = operation.problems if device.type == "cuda" else operation.small_problems
    problem: Any = operation.parse(asked.problem) if asked.problem else defaults[0]
    check_names("dtype", [asked.dtype] if asked.dtype else [], operation.dtypes)
    check_names("layout", [asked.layout] if asked.layout else [], operation.layouts)
    dtypes = [asked.dtype] if asked.dtype else sorted(operation.dtypes, key=lambda one: one != "fp16")
    layouts = [asked.layout] if asked.layout else sorted(operation.layouts, key=lambda one: one != "nhwc")
    return first_choice(asked.target, problem, dtypes, layouts, device, asked.rung)


def target_of(asked: Asked) -> Target:
    """Prepare the target."""
    device = torch.device(asked.device)
    if asked.training:
        step, batch, dtype = _step(asked, device)
        step(*batch)  # creates the optimizer's state
        if not isinstance(step.program, KernelStep):
            raise UnsupportedError(
                "PyTorch computes this plan: there are no kernels of Escalade's to profile"
            )
        casts = "inputs cast", "cast", PYTORCH, step.program.prepare
        optimizer = "parameters stepped", "optimizer_step", "", step.program.finish
        return of_plan(_title(asked, dtype), step.program, device, casts, optimizer)
    if asked.target in ops.OPERATIONS:
        return of_rung(ops.operation(asked.target), chosen(asked, device), device, asked.seed)
    engine, inputs = network(asked.target, asked.batch, asked.dtype, asked.device)
    program = engine.program(*inputs)
    if not isinstance(program, KernelProgram):
        raise UnsupportedError(
            "this plan does not run as one graph of kernels: PyTorch computes it or most of it"
        )
    copies = "inputs brought in", "copy", PYTORCH, lambda: copy_inputs(program, inputs)
    return of_plan(_title(asked, engine.dtype), program, device, copies)


def works_of(asked: Asked) -> tuple[str, list[Work]]:
    """Return title and work of a target for the twin, whose plan needs no compilation."""
    device = torch.device("cpu")
    if asked.training:
        step, _, dtype = _step(asked, device)
        return _title(asked, dtype), work_of_plan(step.plan)
    if asked.target in ops.OPERATIONS:
        choice = chosen(asked, device)
        p = choice.problem
        work = work_of_rung(ops.operation(asked.target), choice)
        return f"{asked.target} {p.name} {p.dtype} {p.layout}", [work]
    engine, inputs = network(asked.target, asked.batch, asked.dtype, "cpu")
    return _title(asked, engine.dtype), work_of_plan(engine.plan(*inputs))


def _title(asked: Asked, dtype: str) -> str:
    return f"{'a step of ' if asked.training else ''}{asked.target}, batch {asked.batch}, {dtype}"


def _step(asked: Asked, device: torch.device) -> tuple[TrainingStep, tuple[torch.Tensor, torch.Tensor], str]:
    """Create a step as `escalade train` does, a batch of synthetic images, and its dtype."""
    task = task_of(asked.target)
    given: dict[str, Any] = {"batch": asked.batch, "seed": asked.seed}
    wanted = settings_of(asked.target, given | ({"dtype": asked.dtype} if asked.dtype else {}), device)
    images = synthetic.make(wanted.batch, wanted.side, wanted.seed, "profile")
    assert images.labels is not None
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(wanted.seed)
        model = task.make(wanted, images).to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    x = images.pixels.to(device).float().div_(255).permute(0, 3, 1, 2)
    batch = x, task.target(x, images.labels.to(device))
    optimizer = optimizer_of(wanted.optimizer, model, wanted.lr, wanted.weight_decay)
    return training_step(model, task.loss, optimizer, batch, dtype=wanted.dtype), batch, wanted.dtype


def launch() -> None:
    """Entry point of the process under Nsight Compute."""
    asked = parsing.parse_dataclass(Asked, parsing.parse(sys.argv[1]))
    ncu.launch(lambda: target_of(asked))


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
        parts, launches = ncu.traced(made, trace)
        if trace is not None:
            console.print(f"wrote {escape(str(trace))}")
        found = found or profile(made.title, ncu.TIMES, parts, launches, ceilings.measure(device))
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
            parts.append(counted_on_twin(work, asked.seed))
    found = Profile(title, "counted on the twin", parts, {})
    for table in terminal.count_tables(found.records()):
        console.print(table)
    _show_words(found, console)
    return found


def show_profile(found: Profile, console: Console) -> None:
    console.print(terminal.profile_table(found))
    _show_words(found, console)
    console.print(f"{counted(len(found.parts), 'part')}, {found.us:.1f} µs in total.", highlight=False)
    if line := terminal.conditions_line([found.conditions]):
        console.print(line, highlight=False)


def _show_words(found: Profile, console: Console) -> None:
    for each in found.parts:
        if each.words:
            console.print(f"[bold]{escape(each.part.name)}[/] {escape(each.words)}", highlight=False)


def compare_with_twin(
    asked: Asked, device: torch.device, found: Profile, console: Console
) -> list[records.Record]:
    """Compare the counts of one call with the twin's; return a record of the card's."""
    choice = chosen(asked, device)
    card = summed(found.parts[0].kernels)
    work = work_of_rung(ops.operation(asked.target), choice)
    counts = counted_on_twin(work, asked.seed).kernels[0].counts
    note = agreement(differences(card, counts))
    console.print(agreement_table(card, counts))
    console.print(note, highlight=False)
    p, config = choice.problem, choice.config.as_dict()
    return [
        records.Record(
            f"{asked.target}_counts", p.name, p.dtype, p.layout, p.batch, "escalade", choice.rung.name,
            config=config, timing="ncu", counts=card, note=note,
        )
    ]  # fmt: skip
