"""An operation called on tensors: the chosen rung is made ready once for each thread, then pointed at them and run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from escalade.device.arguments import BufferPointers
from escalade.device.recipe import Workspace
from escalade.device.run import Executable
from escalade.device.torch_private import FAST_PATHS
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import choose

_MOST_EXECUTABLES = 1024  # of a thread; the oldest goes first
_MOST_KEPT = 2**20  # bytes of a workspace that a thread keeps for each stream


class PerThread(threading.local):
    """What one thread has made ready: an executable's pointers are state."""

    def __init__(self) -> None:
        self.ready: dict[tuple[Any, ...], Ready] = {}
        self.calls: dict[tuple[Any, ...], Any] = {}
        """What `Operator` has ready, by the operator and the kind of its arguments."""
        self.guarded: dict[tuple[Any, ...], list[Any]] = {}
        """The calls again, by less than that; what is left PyTorch's guards compare faster."""


per_thread = PerThread()


class Ready:
    """The chosen rung, compiled and loaded, and the form of the problem that it takes."""

    def __init__(self, problem: Any, executable: Executable) -> None:
        self.problem = problem
        self.executable = executable
        self._pointers: dict[str, BufferPointers] = {}
        self._zeroed: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Runs over these tensors, workspaces among them or not, on their device's current stream."""
        # From PyTorch's allocator at each call: what one stream still uses, another is not given.
        workspaces = {
            workspace.name: workspace.allocate(self.executable.device)
            for workspace in self.executable.recipe.workspaces
            if workspace.name not in tensors
        }
        self.executable.bind({**tensors, **workspaces})
        for pointers in self._pointers.values():
            pointers.forget()
        try:
            self.executable()
        finally:
            self.executable.release()

    def zeroed(self, workspace: Workspace) -> torch.Tensor:
        """Counters for a call on the current stream, which leaves them as it finds them: zeros, kept for the next call.

        A CUDA graph that is being recorded gets its own, since it may be replayed beside other calls.
        """
        device = self.executable.device
        stream = FAST_PATHS.current_stream(device.index)
        if workspace.bytes > _MOST_KEPT or FAST_PATHS.is_capturing():
            return workspace.allocate(device)
        key = (workspace.name, stream)
        if key not in self._zeroed:
            self._zeroed[key] = workspace.allocate(device)
        return self._zeroed[key]

    def pointers(self, name: str) -> BufferPointers:
        """Every place where the address of that buffer stands, for calls that name all of them one by one."""
        if name not in self._pointers:
            self._pointers[name] = BufferPointers()
            self.executable.add_to(self._pointers[name], name)
        return self._pointers[name]


def ready(
    operation: Operation[Any], problem: Problem, device: torch.device, rung: str | None = None
) -> Ready:
    """Made once for each thread, since an executable's pointers are state."""
    known = per_thread.ready
    key = (operation, problem, rung, device)
    found = known.get(key)
    if found is None:
        choice = choose(operation, problem, device, rung)
        taken = choice.problem
        label = f"{taken.name} {taken.dtype} {taken.layout}, rung {choice.rung.name}, {choice.config}"
        found = Ready(taken, Executable(choice.rung.recipe(taken, choice.config), device, label))
        keep(known, key, found)
    return found


def keep(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Adds to what a thread has ready."""
    if len(known) >= _MOST_EXECUTABLES:
        known.pop(next(iter(known)))
    known[key] = value
