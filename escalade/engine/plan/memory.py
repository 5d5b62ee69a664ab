"""The tensors that a plan's kernels are bound to.

Steps reference this object and not their program: a reference cycle would keep the arena allocated until Python's
garbage collector runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.packing import run_packing
from escalade.device.recipe import Recipe
from escalade.engine.graph.forms import STORAGE
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import ConstantForm, PlanStep
from escalade.engine.plan.values import PlanValues


class PlanMemory:
    """The values of a plan, its constants, and the workspaces of its kernels."""

    def __init__(
        self,
        plan: Plan,
        constants: ConstantCache,
        values: PlanValues,
        device: torch.device,
        packed: Mapping[str, torch.Tensor],
    ) -> None:
        """Reuse workspaces in `packed`, which hold weights that another program of this plan has packed."""
        self._plan = plan
        self._device = device
        self._values = values
        self._unread: dict[str, dict[str, torch.Tensor]] = {}
        self.persistent: dict[str, torch.Tensor] = allocate_persistent(plan, device, packed)
        """Workspaces whose contents are kept from run to run, by name."""
        self.constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}

    def of(self, step: PlanStep, recipe: Recipe) -> dict[str, torch.Tensor]:
        """Return the tensors of a step's kernels by role or buffer name."""
        tensors = self._constants_of(step)
        tensors |= {
            role: self._values.dense(name) for role, name in step.node.inputs.items() if role not in tensors
        }
        tensors["y"] = self._values.at(step.node.name)
        tensors |= self._unread_outputs(step)
        tensors |= {
            buffer: self._values.at(name) for buffer, name in self._plan.side_outputs(step.node.name).items()
        }
        for workspace in recipe.workspaces:
            name = step.workspace_name(workspace)
            if name in self.persistent:
                tensors[workspace.name] = self.persistent[name]
            else:
                offset = self._plan.offsets[name]
                tensors[workspace.name] = self._values.arena[offset : offset + workspace.bytes]
        return tensors

    def as_stored(self, name: str) -> torch.Tensor:
        """Return a value for PyTorch's operators, which need one dtype: a floating input may have another."""
        value = self._values.at(name)
        if self._plan.graph.typed:
            return value
        is_image = any(name == entry.name for entry in self._plan.graph.inputs)
        return value.to(STORAGE[self._plan.dtype]) if is_image and value.is_floating_point() else value

    def _constants_of(self, step: PlanStep) -> dict[str, torch.Tensor]:
        return {
            role: self.constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in self._plan.graph.constants
        }

    def _unread_outputs(self, step: PlanStep) -> dict[str, torch.Tensor]:
        """Return buffers for the side outputs that a step's kernels write and no step reads."""
        assert step.lowered is not None
        name = step.node.name
        if name not in self._unread:
            buffers = step.lowered.operation.extra_outputs(step.lowered.problem, self._device)
            read = self._plan.side_outputs(name)
            self._unread[name] = {buffer: tensor for buffer, tensor in buffers.items() if buffer not in read}
        return self._unread[name]


def repack(
    plan: Plan,
    constants: Mapping[ConstantForm, torch.Tensor],
    persistent: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Pack the weights into the plan's persistent workspaces again, on the current stream."""
    for step in plan.steps:
        recipe = step.recipe
        if recipe is None or not (recipe.packing.steps and step.weights_are_constant(plan.graph.constants)):
            continue
        tensors: dict[str, torch.Tensor | None] = {
            role: constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in plan.graph.constants
        }
        for workspace in recipe.workspaces:
            kept = persistent.get(step.workspace_name(workspace))
            tensors[workspace.name] = workspace.allocate(device) if kept is None else kept
        run_packing(recipe, device, step.node.source or step.node.name, tensors)


def allocate_persistent(
    plan: Plan, device: torch.device, packed: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the plan's persistent workspaces: those in `packed` are reused, except counters, which are always new."""
    return {
        name: packed[name] if name in packed and not each.zeroed else each.allocate(device)
        for name, each in plan.persistent.items()
    }
