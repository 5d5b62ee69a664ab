"""The memory of a running plan: its values, in the arena or from PyTorch's allocator, constants, and workspaces.

The result of a PyTorch step stays where PyTorch allocated it, or stays a view, so that the step costs what it costs in
PyTorch. It is released after its last reader. During CUDA graph capture the memory comes from the graph's private pool,
so its address is the same at every replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from escalade.device.packing import run_packing
from escalade.device.recipe import Recipe
from escalade.device.strides import is_aligned, same_order
from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep


class PlanValues:
    """Values by name, for one run after another; constants are not included."""

    def __init__(self, plan: Plan, arena: torch.Tensor, bound: Mapping[str, torch.Tensor]) -> None:
        """Read the inputs in `bound` from these tensors at every run."""
        self._plan = plan
        self.arena = arena
        self._views: dict[str, torch.Tensor] = {}
        """Views into the arena, cached: creating one takes as long as the rest of a call."""
        self._bound = bound
        self._outside: torch.Tensor | None = None
        self._pytorch_owned: dict[str, torch.Tensor] = {}
        self._alias_views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Aliases of values without a fixed address: the source they were computed from, and the view."""
        self._release_after: dict[int, list[str]] = {}
        for name, last in plan.pytorch_owned.items():
            self._release_after.setdefault(last, []).append(name)

    def has_address(self, name: str) -> bool:
        """Return True if a value has the same address in every run."""
        return name in self._plan.offsets or name in self._bound

    def at(self, name: str) -> torch.Tensor:
        """Return a value with whatever strides it has, which PyTorch's operators accept."""
        if name in self._bound:
            return self._bound[name]
        if self.has_address(name):
            form, offset = self._plan.forms[name], self._plan.offsets[name]
            if name in self._plan.outside:
                return form.view(self.outside, offset - self._plan.arena_bytes)
            if name not in self._views:
                with torch.inference_mode(False):  # the view must be usable in and out of inference mode
                    self._views[name] = form.view(self.arena, offset)
            return self._views[name]
        if name in self._pytorch_owned:
            return self._pytorch_owned[name]
        node = self._plan.graph.nodes[name]
        source = self.at(node.inputs["x"])
        if name not in self._alias_views or self._alias_views[name][0] is not source:
            self._alias_views[name] = source, compute(node, {"x": source}, source.device)
        return self._alias_views[name][1]

    def set_arena(self, arena: torch.Tensor) -> None:
        self.arena = arena
        self._views = {}

    @property
    def outside(self) -> torch.Tensor:
        """Our own memory for values outside the arena, used when there is no call; allocated on first use."""
        if self._outside is None:
            with torch.inference_mode(False):
                size, device = self._plan.outside_bytes, self.arena.device
                self._outside = torch.empty(size, dtype=torch.uint8, device=device)
        return self._outside

    def release_outside(self) -> None:
        self._outside = None

    def dense(self, name: str) -> torch.Tensor:
        """Return a value with the strides and alignment that kernels need, copied if necessary."""
        value = self.at(name)
        if self.has_address(name):
            return value
        to_form = self.to_form(name, value)
        if name in self._pytorch_owned:
            self._pytorch_owned[name] = to_form
        else:
            self._alias_views[name] = self._alias_views[name][0], to_form
        return to_form

    def to_form(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the plan's form for `name`, copied if necessary."""
        return to_form(self._plan.forms[name], value)

    def store(self, step: PlanStep, result: torch.Tensor) -> None:
        """Store the result of a PyTorch step in the plan's dtype."""
        name = step.node.name
        if self.has_address(name):
            self.at(name).copy_(result)
            return
        own = result.to(self._plan.forms[name].dtype)
        # Some PyTorch operators return their input although their schema does not declare an alias. The plan may reuse
        # the input's bytes, so the result is copied.
        unexpected = self._is_in_arena(own) and not operator_of(step.node).may_alias(step.node)
        self._pytorch_owned[name] = own.clone() if unexpected else own

    def release_after(self, number: int) -> None:
        """Release the values whose last reader is this step."""
        for name in self._release_after.get(number, ()):
            self._pytorch_owned.pop(name, None)
            self._alias_views.pop(name, None)

    def _is_in_arena(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr()


def to_form(form: Form, value: torch.Tensor) -> torch.Tensor:
    """Return a value in this form (dtype, strides, alignment), copied if necessary."""
    _, strides = _memory(form)
    if same_order(value.shape, value.stride(), strides) and value.dtype is form.dtype and is_aligned(value):
        return value
    return empty_form(form, value.device).copy_(value)


def empty_form(form: Form, device: torch.device) -> torch.Tensor:
    """Allocate a tensor in this form."""
    size, strides = _memory(form)
    flat = torch.empty(size, dtype=torch.uint8, device=device).view(form.dtype)
    return flat.as_strided(form.shape, strides)


@lru_cache(maxsize=4096)
def _memory(form: Form) -> tuple[int, tuple[int, ...]]:
    """Return the size in bytes and the strides of a tensor in this form."""
    size = form.rows * (form.pitch or form.row) * form.dtype.itemsize
    return size, form.view(torch.empty(size, dtype=torch.uint8, device="meta"), 0).stride()


class PlanMemory:
    """The tensors that a plan's kernels are bound to: values, constants, and workspaces.

    Steps reference this object and not their program: a reference cycle would keep the arena allocated until Python's
    garbage collector runs.
    """

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
