"""Prepared rungs per thread: chosen, compiled and loaded once, then run on any tensors."""

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

_MAX_EXECUTABLES = 1024  # per thread; evicts the oldest
_MAX_KEPT_BYTES = 2**20  # of a zeroed workspace that a thread keeps per stream


class PerThread(threading.local):
    """Caches of one thread. They are not shared because an executable's pointers are mutable state."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[Any, ...], PreparedRung] = {}
        self.calls: dict[tuple[Any, ...], Any] = {}
        """Prepared calls of `Operator`, by operator and kind of arguments."""
        self.guarded: dict[tuple[Any, ...], list[Any]] = {}
        """The same calls under a coarser key; PyTorch's guards compare the rest faster."""


per_thread = PerThread()


class PreparedRung:
    """The chosen rung, compiled and loaded, and the problem it computes (perhaps in another layout)."""

    def __init__(self, problem: Any, executable: Executable) -> None:
        self.problem = problem
        self.executable = executable
        self._pointers: dict[str, BufferPointers] = {}
        self._zeroed: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Run on these tensors, which may include workspaces, on their device's current stream."""
        # Allocated per call: the caching allocator does not reuse memory that another stream still reads.
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
        """Return zeros for a call on the current stream. The kernel leaves them zero, so the next call reuses them.

        A CUDA graph under capture gets its own, since it may be replayed concurrently with other calls.
        """
        device = self.executable.device
        stream = FAST_PATHS.current_stream(device.index)
        if workspace.bytes > _MAX_KEPT_BYTES or FAST_PATHS.is_capturing():
            return workspace.allocate(device)
        key = (workspace.name, stream)
        if key not in self._zeroed:
            self._zeroed[key] = workspace.allocate(device)
        return self._zeroed[key]

    def pointers(self, name: str) -> BufferPointers:
        """Return all launch parameters that hold the address of a buffer."""
        if name not in self._pointers:
            self._pointers[name] = BufferPointers()
            self.executable.add_to(self._pointers[name], name)
        return self._pointers[name]


def prepare_rung(
    operation: Operation[Any], problem: Problem, device: torch.device, rung: str | None = None
) -> PreparedRung:
    """Choose, compile and load a rung, once per thread."""
    known = per_thread.prepared
    key = (operation, problem, rung, device)
    found = known.get(key)
    if found is None:
        choice = choose(operation, problem, device, rung)
        p = choice.problem
        label = f"{p.name} {p.dtype} {p.layout}, rung {choice.rung.name}, {choice.config}"
        found = PreparedRung(p, Executable(choice.rung.recipe(p, choice.config), device, label))
        keep(known, key, found)
    return found


def keep(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Add to a thread's cache."""
    if len(known) >= _MAX_EXECUTABLES:
        known.pop(next(iter(known)))
    known[key] = value
