"""Bind a plan's kernels to the caller's tensors: inputs are read in place, results are written in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from escalade.device.arguments import BufferPointers
from escalade.device.run import Executable
from escalade.device.strides import ALIGNMENT, is_packed
from escalade.device.torch_private import FAST_PATHS
from escalade.engine.graph.forms import Form
from escalade.engine.plan.kernels import PlanKernels

_MAX_GUARDS = 16
"""Guards built per input. Building one costs more than a check, so inputs that keep changing stop getting new ones."""

Point = Callable[[int], object]
"""Sets the pointer arguments of kernels to an address."""


class InputBinding:
    """Binds kernels to an input, or to a copy of it that they can read."""

    def __init__(self, form: Form, device: torch.device, point: Point) -> None:
        self._dtype = form.dtype
        self._is_packed: Callable[[torch.Tensor], bool] = partial(is_packed, layout=form.layout)
        self._copy = OutputBinding(form, device, point)
        self._point = point
        self._matches_last: Callable[..., bool] = lambda tensor: False
        self._guards = 0

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the launches will read, which must stay alive until they are enqueued.

        A copy if the dtype, strides or alignment differ from the plan's, or if PyTorch's lazy negation bit is set.
        """
        address = tensor.data_ptr()
        if not address % ALIGNMENT and (self._matches_last(tensor) or self._is_readable(tensor)):
            self._point(address)
            return tensor
        return self._copy.allocate().copy_(tensor.detach())

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        # Several times slower than the guard of the last tensor: the first calls and other PyTorch modes get here.
        if tensor.dtype is not self._dtype or not self._is_packed(tensor) or FAST_PATHS.is_negative(tensor):
            return False
        if self._guards < _MAX_GUARDS:
            self._matches_last = FAST_PATHS.guard([tensor])
            self._guards += 1
        return True


class OutputBinding:
    """Binds kernels to a result: a new tensor per call, or the caller's."""

    def __init__(self, form: Form, device: torch.device, point: Point) -> None:
        like = form.view(torch.empty(form.bytes, dtype=torch.uint8, device="meta"), 0)
        self._dtype, self._strides = form.dtype, like.stride()
        self._shape = tuple(like.shape)
        self._device = device
        self._fast_empty = FAST_PATHS.allocator(device) if device.type == "cuda" else None
        self._point = point

    def _empty(self) -> torch.Tensor:
        if self._fast_empty is not None and FAST_PATHS.current_device() == self._device.index:
            return self._fast_empty(self._shape, self._strides, self._dtype)
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)

    def allocate(self) -> torch.Tensor:
        tensor = self._empty()
        self._point(tensor.data_ptr())
        return tensor

    def bind(self, out: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the launches will write: `out` if its memory layout matches, else a new one."""
        if not self._is_writable(out):
            return self.allocate()
        self._point(out.data_ptr())
        return out

    def _is_writable(self, out: torch.Tensor) -> bool:
        return (
            out.dtype is self._dtype
            and out.stride() == self._strides
            and not out.data_ptr() % ALIGNMENT
            and not FAST_PATHS.is_negative(out)
        )


@dataclass(frozen=True)
class LaunchPointers:
    """Pointer arguments of a plan's launches."""

    outside: Mapping[str, BufferPointers]
    """Pointers into the caller's tensors, by the name of the input or output."""
    arena: BufferPointers
    counters: Mapping[str, BufferPointers]
    """Pointers to workspaces that must be zero before the first launch, by name."""

    @staticmethod
    def of(kernels: PlanKernels) -> LaunchPointers:
        plan = kernels.plan
        found = LaunchPointers(
            {name: BufferPointers() for name in plan.outside.values()},
            BufferPointers(),
            {name: BufferPointers() for name, workspace in plan.persistent.items() if workspace.zeroed},
        )
        steps = (step for step in plan.steps if step.runs)
        for step, executable in zip(steps, kernels.calls, strict=True):
            if not isinstance(executable, Executable):
                continue
            for role, name in {
                **step.node.inputs,
                "y": step.node.name,
                **plan.side_outputs(step.node.name),
            }.items():
                if name in plan.outside:
                    holder = plan.outside[name]
                    executable.add_to(found.outside[holder], role, plan.offsets[name] - plan.offsets[holder])
                elif name not in plan.graph.constants:
                    executable.add_to(found.arena, role, plan.offsets[name])
            for workspace in executable.recipe.workspaces:
                name = step.workspace_name(workspace)
                if name in found.counters:
                    executable.add_to(found.counters[name], workspace.name)
                elif name not in plan.persistent:
                    executable.add_to(found.arena, workspace.name, plan.offsets[name])
        return found
