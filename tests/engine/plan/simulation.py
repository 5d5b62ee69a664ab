"""Plans executed over their own memory, with PyTorch in place of kernels.

Finds the same errors in a plan's offsets and lifetimes as the twin, without compiling a kernel: every step reads
its values from the arena and writes its result there. Workspaces are filled with garbage before and after their step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.lowering import STORED
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.memory import PlanValues
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep

CPU = torch.device("cpu")
GARBAGE = 0xFF
"""NaN in every floating type."""


def executed(plan: Plan, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of a floating-point plan, run over the test's own memory."""
    constants = _constants(plan)
    values = PlanValues(plan, torch.full((plan.arena_bytes,), GARBAGE, dtype=torch.uint8), {})
    for name, tensor in inputs.items():
        values.at(name).copy_(tensor)

    def read(step: PlanStep) -> dict[str, torch.Tensor]:
        return {
            role: constants[step.constant(role)] if name in plan.graph.constants else values.at(name)
            for role, name in step.node.inputs.items()
        }

    def spoil(step: PlanStep) -> None:
        for workspace in step.recipe.workspaces if step.recipe else ():
            place = plan.offsets.get(step.workspace_name(workspace))
            if place is not None:
                values.arena[place : place + workspace.bytes].fill_(GARBAGE)

    for number, step in enumerate(plan.steps):
        if step.runs:
            spoil(step)
            result = compute(step.node, read(step), CPU)
            if step.in_pytorch:
                values.store(step, result)
            else:
                values.at(step.node.name).copy_(result)
            for other in plan.steps:
                if other.side_output is not None and other.side_output.node == step.node.name:
                    values.at(other.node.name).copy_(compute(other.node, read(other), CPU))
            spoil(step)
        values.release_after(number)
    return [
        constants[ConstantForm(name, STORED)] if name in plan.graph.constants else values.at(name).clone()
        for name in plan.graph.outputs
    ]


def expected(plan: Plan, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of the plan's graph, with every value in a separate tensor."""
    constants = _constants(plan)
    values = dict(inputs)
    for step in plan.steps:
        given = {
            role: constants[step.constant(role)] if name in plan.graph.constants else values[name]
            for role, name in step.node.inputs.items()
        }
        values[step.node.name] = compute(step.node, given, CPU).to(plan.forms[step.node.name].dtype)
    return [
        constants[ConstantForm(name, STORED)] if name in plan.graph.constants else values[name]
        for name in plan.graph.outputs
    ]


def _constants(plan: Plan) -> dict[ConstantForm, torch.Tensor]:
    made = ConstantCache(plan.dtype, CPU, plan.graph.typed)
    return {entry: made.get(entry, plan.graph) for entry in plan.constants}


def check_execution(plan: Plan, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Require that a plan's memory holds the results of its graph for these inputs, and return them."""
    inputs = {
        given.name: tensor.to(plan.forms[given.name].dtype)
        for given, tensor in zip(plan.graph.inputs, tensors, strict=True)
    }
    results = executed(plan, inputs)
    # An overwritten value is far off; the tolerance is for rounding in another order.
    close = 1e-2 if plan.dtype == "fp16" else 1e-3
    torch.testing.assert_close(results, expected(plan, inputs), rtol=close, atol=close)
    return results
