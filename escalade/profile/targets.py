"""Targets: a rung on a problem, the plan of a network, a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from escalade.device.packing import Prepared
from escalade.device.recipe import Recipe
from escalade.engine.explain import ExplainedStep, explain_plan
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import Kernels
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import Step
from escalade.engine.step_times import fill
from escalade.engine.training.program import KernelStep
from escalade.measure.verification import outputs_of
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.pytorch import PYTORCH
from escalade.profile.parts import Part, Target, entries

Call = Callable[[], object]


def of_rung(
    operation: Operation[Any], problem: Any, rung: Rung[Any], config: Config, device: torch.device, seed: int
) -> Target:
    """One call of a rung over random inputs, as a ladder times it: weights are packed before where they stay."""
    recipe = rung.recipe(problem, config)
    title = f"{operation.name} {problem.name} {problem.dtype} {problem.layout}, rung {rung.name}"
    prepared = Prepared(recipe, device, title, weights_stay=operation.weights_stay)
    tensors = {**operation.inputs(problem, device, seed), **outputs_of(operation, problem, device)}
    call = prepared.bind(tensors)
    part = part_of_rung(operation, problem, rung, prepared.executable.recipe)
    return Target(f"{title} ({config})" if config.as_dict() else title, device, lambda: iter([(part, call)]))


def part_of_rung(operation: Operation[Any], problem: Any, rung: Rung[Any], recipe: Recipe) -> Part:
    """A call of a rung, of which `recipe` is launched."""
    return Part(
        rung.name,
        operation.name,
        problem.name,
        problem.dtype,
        rung.name,
        entries(recipe),
        problem.flops,
        problem.bytes,
    )


def of_network(
    title: str, program: KernelProgram, inputs: tuple[torch.Tensor, ...], device: torch.device
) -> Target:
    """The steps of a plan, one after another over memory of the plan's own."""

    def pieces() -> Iterator[tuple[Part, Call]]:
        program.at_home()
        yield Part("inputs brought in", "copy", "", program.plan.dtype, PYTORCH, None), bring_in
        yield from _steps(program)

    def bring_in() -> None:
        fill(program, inputs)

    return Target(title, device, pieces)


def of_training(title: str, program: KernelStep, device: torch.device) -> Target:
    """The steps of a training step's plan, and what is done in front of them and behind."""
    dtype = program.plan.dtype

    def pieces() -> Iterator[tuple[Part, Call]]:
        yield Part("inputs cast", "cast", "", dtype, PYTORCH, None), program.prepare
        yield from _steps(program)
        yield Part("parameters stepped", "optimizer_step", "", dtype, "", None), program.finish

    return Target(title, device, pieces)


def _steps(kernels: Kernels) -> Iterator[tuple[Part, Call]]:
    explained = {each.name: each for each in explain_plan(kernels.plan).steps}
    for step, call in kernels.one_by_one():
        yield part_of_step(kernels.plan, step, explained[step.node.name]), call


def part_of_step(plan: Plan, step: Step, said: ExplainedStep) -> Part:
    """A step as the plan names it."""
    name = f"{said.number} {said.operation}" + (f" {said.source}" if said.source else "")
    dtype = said.dtype if step.lowered else plan.dtype
    launched = None
    if step.recipe is not None:
        ready = step.has_weights_ready(plan.graph.constants)
        launched = entries(step.recipe.after_packing if ready else step.recipe)
    return Part(name, said.operation, said.problem, dtype, said.rung, launched, said.flops, said.bytes)
