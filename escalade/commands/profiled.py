"""What `profile` looks at: a rung on a problem, a network, a step of training; in this process or in one of its own."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from escalade import ops, parsing
from escalade.commands.networks import KINDS, is_network, network
from escalade.commands.selection import check_names
from escalade.engine import training_step
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.training.program import KernelStep
from escalade.engine.training.step import TrainingStep
from escalade.errors import UnsupportedError
from escalade.ops.choose.choice import Choice, choose
from escalade.profile import ncu, twin
from escalade.profile.parts import Target
from escalade.profile.targets import of_network, of_rung, of_training
from escalade.train.data import synthetic
from escalade.train.settings import Settings
from escalade.train.steps import optimizer_of
from escalade.train.tasks import TASKS, task_of
from escalade.train.tasks import settings as settings_of


@dataclass(frozen=True)
class Asked:
    """A target as it is named on the command line; None stands for what is usual."""

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
            raise UnsupportedError(f"a batch of {self.batch}: it must be at least 1")
        if self.training and self.target not in TASKS:
            raise UnsupportedError(f"--training is for what can be trained: {', '.join(TASKS)}")
        if given and self.target not in ops.OPERATIONS:
            raise UnsupportedError(
                f"{', '.join(given)}: that is of an operation, and {self.target} is none; there is "
                f"{', '.join(ops.OPERATIONS)}"
            )
        if self.target not in ops.OPERATIONS and not self.training and not is_network(self.target):
            raise UnsupportedError(
                f"{self.target!r} is neither an operation ({', '.join(ops.OPERATIONS)}), {KINDS}"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def target_of(asked: Asked) -> Target:
    """The target made ready."""
    device = torch.device(asked.device)
    if asked.training:
        return _training(asked, device)
    if asked.target in ops.OPERATIONS:
        operation = ops.operation(asked.target)
        choice = chosen(asked, device)
        return of_rung(operation, choice.problem, choice.rung, choice.config, device, asked.seed)
    engine, inputs = network(asked.target, asked.batch, asked.dtype, asked.device)
    program = engine.program(*inputs)
    if not isinstance(program, KernelProgram):
        raise UnsupportedError(
            "this plan is no graph of kernels: PyTorch computes it, or takes most of it over the caller's tensors"
        )
    return of_network(f"{asked.target}, batch {asked.batch}, {engine.dtype}", program, inputs, device)


def chosen(asked: Asked, device: torch.device) -> Choice:
    """The rung, and the problem in the first dtype and layout that the rung takes of those that are asked for."""
    operation = ops.operation(asked.target)
    usual = operation.problems if device.type == "cuda" else operation.small_problems
    problem: Any = operation.parse(asked.problem) if asked.problem else usual[0]
    dtypes = (asked.dtype,) if asked.dtype else ("fp16", *operation.dtypes)
    layouts = (asked.layout,) if asked.layout else ("nhwc", *operation.layouts)
    check_names("dtype", [asked.dtype] if asked.dtype else [], operation.dtypes)
    check_names("layout", [asked.layout] if asked.layout else [], operation.layouts)
    refusal: UnsupportedError | None = None
    for dtype, layout in itertools.product(dtypes, layouts):
        if dtype not in operation.dtypes or layout not in operation.layouts:
            continue
        try:
            return choose(operation, replace(problem, dtype=dtype, layout=layout), device, asked.rung)
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def works_of(asked: Asked) -> tuple[str, list[twin.Work]]:
    """What the twin runs for a target, and its title. Plans are those of the CPU: nothing is compiled for them."""
    device = torch.device("cpu")
    if asked.training:
        step, _, settings = _step(asked, device)
        return _training_title(asked, settings), twin.of_plan(step.plan)
    if asked.target in ops.OPERATIONS:
        choice = chosen(asked, device)
        problem = choice.problem
        title = f"{asked.target} {problem.name} {problem.dtype} {problem.layout}"
        return title, twin.of_rung(ops.operation(asked.target), choice)
    engine, inputs = network(asked.target, asked.batch, asked.dtype, "cpu")
    return f"{asked.target}, batch {asked.batch}, {engine.dtype}", twin.of_plan(engine.plan(*inputs))


def _training(asked: Asked, device: torch.device) -> Target:
    step, batch, settings = _step(asked, device)
    step(*batch)  # takes over the optimiser's state
    program = step.program
    if not isinstance(program, KernelStep):
        raise UnsupportedError("PyTorch computes this plan: there are no kernels of Escalade's to look at")
    return of_training(_training_title(asked, settings), program, device)


def _training_title(asked: Asked, settings: Settings) -> str:
    return f"a step of {asked.target}, batch {asked.batch}, {settings.dtype}"


def _step(
    asked: Asked, device: torch.device
) -> tuple[TrainingStep, tuple[torch.Tensor, torch.Tensor], Settings]:
    """A step as `escalade train` takes it, a batch of images that are made up, and the settings."""
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
    return training_step(model, task.loss, optimizer, batch, dtype=wanted.dtype), batch, wanted


def launch() -> None:
    """What a process of its own does under Nsight Compute."""
    asked = parsing.typed(Asked, parsing.parse(sys.argv[1]))
    ncu.launch(lambda: target_of(asked))
