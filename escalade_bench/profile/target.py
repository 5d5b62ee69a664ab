"""Targets of a profile: a rung on a problem, the plan of a network, a training step; each part launches kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.packing import PreparedRecipe
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.run import Executable, TwinOptions
from escalade.engine.explain import ExplainedStep, explain_plan
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.plan import Plan, PlanStep
from escalade.errors import EscaladeError
from escalade.ops.base.operation import Operation
from escalade.ops.choose.choice import Choice
from escalade.terminal_text import counted
from escalade.tune.verification import outputs_of


@dataclass(frozen=True)
class Part:
    """A step of a plan, or the call of a rung."""

    name: str
    """Name of its NVTX range."""
    operation: str
    problem: str
    dtype: str
    """Dtype of its products, which sets the peak rate."""
    rung: str
    """The rung that computes it, or the system that does."""
    kernels: list[str] | None
    """Kernels in launch order; None if PyTorch launches them."""
    flops: int = 0
    """Operations of the direct algorithm; 0 if unknown."""
    bytes: int = 0
    """Fewest bytes that it moves; 0 if unknown."""


Call = Callable[[], object]
Pieces = Iterator[tuple[Part, Call]]
"""Parts with the call of each; a call runs before the next part is generated."""
Other = tuple[str, str, str, Call]
"""Name, operation, system and call of a part without known kernels."""


@dataclass(frozen=True)
class Target:
    """A target whose kernels are compiled and whose tensors are allocated."""

    title: str
    device: torch.device
    pieces: Callable[[], Pieces]

    def run(self) -> list[Part]:
        """Launch every part once, in a range of its name; return the parts."""
        done = []
        for part, call in self.pieces():
            nvtx = torch.cuda.nvtx.range("{}", part.name) if self.device.type == "cuda" else nullcontext()
            with torch.profiler.record_function(part.name), nvtx:
                call()
            done.append(part)
        return done

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Work:
    """A part of Escalade's own kernels, as a recipe that can run alone over random inputs."""

    part: Part
    operation: Operation[Any]
    problem: Any
    recipe: Recipe
    weights_are_constant: bool

    def bind(self, device: torch.device, seed: int, options: TwinOptions = TwinOptions()) -> Executable:
        """Allocate inputs and outputs; weights that stay are packed here, not in each call."""
        prepared = PreparedRecipe(
            self.recipe,
            device,
            self.part.name,
            weights_are_constant=self.weights_are_constant,
            options=options,
        )
        outputs = outputs_of(self.operation, self.problem, device)
        return prepared.bind({**self.operation.inputs(self.problem, device, seed), **outputs})


def work_of_rung(operation: Operation[Any], choice: Choice) -> Work:
    problem, rung, stay = choice.problem, choice.rung.name, operation.weights_are_constant
    recipe = choice.rung.recipe(problem, choice.config)
    launched = _entries(recipe.after_packing if stay else recipe)
    part = Part(
        rung, operation.name, problem.name, problem.dtype, rung, launched, problem.flops, problem.bytes
    )
    return Work(part, operation, problem, recipe, stay)


def of_rung(operation: Operation[Any], choice: Choice, device: torch.device, seed: int) -> Target:
    """One call of a rung over random inputs, as a ladder times it."""
    p, work = choice.problem, work_of_rung(operation, choice)
    call = work.bind(device, seed)
    title = f"{operation.name} {p.name} {p.dtype} {p.layout}, rung {choice.rung.name}"
    if choice.config.as_dict():
        title += f" ({choice.config})"
    return Target(title, device, lambda: iter([(work.part, call)]))


def of_plan(
    title: str, kernels: PlanKernels, device: torch.device, before: Other, after: Other | None = None
) -> Target:
    """The steps of a plan, with the launches of others before and after them."""
    plan = kernels.plan

    def pieces() -> Pieces:
        kernels.bind_own_memory()
        yield _other(before, plan.dtype)
        explained = {each.name: each for each in explain_plan(plan).steps}
        for step, call in kernels.iter_steps():
            yield _part_of_step(plan, step, explained[step.node.name]), call
        if after is not None:
            yield _other(after, plan.dtype)

    return Target(title, device, pieces)


def _other(given: Other, dtype: str) -> tuple[Part, Call]:
    name, operation, rung, call = given
    return Part(name, operation, "", dtype, rung, None), call


def work_of_plan(plan: Plan) -> list[Work]:
    """The steps of a plan that Escalade's kernels compute."""
    return [
        Work(
            _part_of_step(plan, step, explained), step.lowered.operation, step.lowered.problem, step.recipe,
            step.weights_are_constant(plan.graph.constants),
        )
        for step, explained in zip(plan.steps, explain_plan(plan).steps, strict=True)
        if step.lowered is not None and step.recipe is not None and step.runs
    ]  # fmt: skip


def _part_of_step(plan: Plan, step: PlanStep, explained: ExplainedStep) -> Part:
    one = explained
    launched = None
    if step.recipe is not None:
        ready = step.weights_are_constant(plan.graph.constants)
        launched = _entries(step.recipe.after_packing if ready else step.recipe)
    name = f"{one.number} {one.operation}" + (f" {one.source}" if one.source else "")
    dtype = one.dtype if step.lowered else plan.dtype
    return Part(name, one.operation, one.problem, dtype, one.rung, launched, one.flops, one.bytes)


def _entries(recipe: Recipe) -> list[str]:
    return [step.program.entry for step in recipe.steps if isinstance(step, KernelCall)]


def merged(parts: Iterable[Part]) -> list[Part]:
    """Merge neighbors of unknown kernels: their launches cannot be told apart."""
    found: list[Part] = []
    for part in parts:
        if found and part.kernels is None and found[-1].kernels is None:
            before = found.pop()
            operations = dict.fromkeys((*before.operation.split(", "), part.operation))
            part = Part(
                f"{before.name}, {part.name}", ", ".join(operations), "", part.dtype, part.rung, None,
                before.flops + part.flops, before.bytes + part.bytes,
            )  # fmt: skip
        found.append(part)
    return found


def owners(parts: Sequence[Part], launched: Sequence[str]) -> list[int]:
    """Return the part of each launch, by kernel names and their order.

    An unexpected launch belongs to the current part if that has kernels left, else to the next: PyTorch's kernels to
    PyTorch's part, and copies to the kernel after them.
    """
    expected = [(number, name) for number, part in enumerate(parts) for name in part.kernels or ()]
    found: list[int] = []
    current, at = -1, 0
    for name in launched:
        following = expected[at] if at < len(expected) else (len(parts), "")
        if _plain(name) == following[1]:
            current, at = following[0], at + 1
            found.append(current)
        else:
            found.append(current if following[0] == current else min(current + 1, len(parts) - 1))
    missing = dict.fromkeys(name for _, name in expected[at:])
    if missing:
        raise EscaladeError(
            f"the profiler saw {counted(len(launched), 'launch')}, and none of {', '.join(missing)} among the "
            "last; they began "
            f"with {', '.join(map(_plain, launched[:3])) or 'nothing'}"
        )
    return found


def _plain(kernel: str) -> str:
    """Strip the parameters from a kernel's name."""
    return kernel.split("(")[0].strip()
