"""An operation called on tensors: the chosen rung is made ready once for each thread, then bound and run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.run import Executable
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import choose

_MOST_EXECUTABLES = 1024  # of a thread; the oldest goes first
_ALIGNMENT = 16
_local = threading.local()


@dataclass(frozen=True)
class Ready:
    """The chosen rung, compiled and loaded, and the form of the problem that it takes."""

    problem: Any
    executable: Executable

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Runs over these tensors, workspaces among them or not, on their device's current stream."""
        # From PyTorch's allocator at each call: what one stream still uses, another is not given.
        workspaces = {
            workspace.name: workspace.allocate(self.executable.device)
            for workspace in self.executable.recipe.workspaces
            if workspace.name not in tensors
        }
        self.executable.bind({**tensors, **workspaces})
        try:
            self.executable()
        finally:
            self.executable.release()


def ready(
    operation: Operation[Any], problem: Problem, device: torch.device, rung: str | None = None
) -> Ready:
    """Made once for each thread, since an executable's pointers are state."""
    known: dict[tuple[Any, ...], Ready] = _local.__dict__.setdefault("ready", {})
    key = (operation, problem, rung, device)
    found = known.get(key)
    if found is None:
        choice = choose(operation, problem, device, rung)
        taken = choice.problem
        label = f"{taken.name} {taken.dtype} {taken.layout}, rung {choice.rung.name}, {choice.config}"
        found = Ready(taken, Executable(choice.rung.recipe(taken, choice.config), device, label))
        if len(known) >= _MOST_EXECUTABLES:
            known.pop(next(iter(known)))
        known[key] = found
    return found


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels load 16 bytes at a time; a tensor that starts inside another's memory may lie between."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
