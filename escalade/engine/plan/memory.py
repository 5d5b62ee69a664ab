"""What a plan's kernels read and write, where it lies now.

Steps hold on to this, not to the program that they are of: a program that holds steps which hold it is only freed when
Python searches for garbage, and with it the memory of a plan that nobody has any more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.recipe import Recipe
from escalade.engine.graph.forms import STORAGE
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import Step
from escalade.engine.plan.values import Values


class Memory:
    """The values of a plan, its constants, and the workspaces of its kernels."""

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        values: Values,
        device: torch.device,
        packed: Mapping[str, torch.Tensor],
    ) -> None:
        """`packed` are workspaces of other kernels of this plan, whose weights are packed already."""
        self._plan = plan
        self._device = device
        self._values = values
        self._rooms: dict[str, dict[str, torch.Tensor]] = {}
        self.lasting: dict[str, torch.Tensor] = lasting(plan, device, packed)
        """Workspaces that keep what they hold from run to run, by name."""
        self.constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}

    def of(self, step: Step, recipe: Recipe) -> dict[str, torch.Tensor]:
        """What a step's kernels read and write."""
        tensors = self._constants_of(step)
        tensors |= {
            role: self._values.dense(name) for role, name in step.node.inputs.items() if role not in tensors
        }
        tensors["y"] = self._values.at(step.node.name)
        tensors |= self._unread(step)
        tensors |= {
            buffer: self._values.at(name) for buffer, name in self._plan.beside(step.node.name).items()
        }
        for workspace in recipe.workspaces:
            name = step.workspace_name(workspace)
            if name in self.lasting:
                tensors[workspace.name] = self.lasting[name]
            else:
                offset = self._plan.places[name]
                tensors[workspace.name] = self._values.arena[offset : offset + workspace.bytes]
        return tensors

    def as_stored(self, name: str) -> torch.Tensor:
        """A value for PyTorch, which multiplies numbers of one type: an image may have come in another."""
        value = self._values.at(name)
        if self._plan.graph.typed:
            return value
        is_image = any(name == given.name for given in self._plan.graph.inputs)
        return value.to(STORAGE[self._plan.dtype]) if is_image and value.is_floating_point() else value

    def _constants_of(self, step: Step) -> dict[str, torch.Tensor]:
        return {
            role: self.constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in self._plan.graph.constants
        }

    def _unread(self, step: Step) -> dict[str, torch.Tensor]:
        """Room for what a step's kernels write besides its result, and nobody reads."""
        assert step.lowered is not None
        if step.node.name not in self._rooms:
            every = step.lowered.operation.further_outputs(step.lowered.problem, self._device)
            read = self._plan.beside(step.node.name)
            self._rooms[step.node.name] = {name: room for name, room in every.items() if name not in read}
        return self._rooms[step.node.name]


def lasting(plan: Plan, device: torch.device, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Workspaces that keep what they hold: weights that are packed already, and new ones. Counters are always new."""
    return {
        name: packed[name] if name in packed and not each.zeroed else each.allocate(device)
        for name, each in plan.lasting.items()
    }
