"""Calls that write memory of a loaded program itself take turns, in every thread and on every stream.

A `__constant__` array is one for all who launch the program: a call that fills it has to wait until the call before has
read it. On the twin, where a call has ended when it returns, a lock for each program will do. On a GPU the lock orders
the launches of threads, and an event for each program their work on different streams.

A CUDA graph is replayed without any of this being asked, so each graph has a copy of the program to itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from escalade.device import cuda
from escalade.device.program import Program
from escalade.errors import LaunchError

ProgramCopies = Mapping[Program, cuda.CudaKernel]


class ConstantLock(Protocol):
    def take(self) -> AbstractContextManager[ProgramCopies]:
        """A turn, with the copies of the programs to be launched in it: none for those that `cuda.load` gives."""


class TwinConstantLock:
    """Lets calls of the twin's kernels take turns: a library has one set of variables."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._locks = [_twin_locks.setdefault(program, threading.Lock()) for program in programs]

    @contextmanager
    def take(self) -> Iterator[ProgramCopies]:
        with ExitStack() as held:
            for lock in self._locks:  # in one order for all: programs come sorted
                held.enter_context(lock)
            yield {}


_twin_locks: dict[Program, threading.Lock] = {}


@dataclass
class _Copy:
    """A loaded program, and when the last call that uses it will have ended."""

    kernel: cuda.CudaKernel
    done: torch.cuda.Event | None = None

    @contextmanager
    def used_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        if self.done is not None:
            stream.wait_event(self.done)
        try:
            yield
        finally:  # what was enqueued before a failure runs all the same
            if self.done is None:
                self.done = torch.cuda.Event()
            self.done.record(stream)


@dataclass
class _Owner:
    """The copies of one program on one device."""

    program: Program
    device_index: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    _plain: _Copy | None = None
    _spare: cuda.CudaKernel | None = None
    """A copy for the next graph: while it is recorded, nothing can be loaded."""
    _graphs: dict[int, _Copy] = field(default_factory=dict)
    """The copies that graphs have. Each lasts as long as the process: a graph may be replayed at any time."""

    def plain(self) -> _Copy:
        """The copy for calls that run at once."""
        if self._plain is None:
            self._plain = _Copy(cuda.load(self.program, self.device_index))
        return self._plain

    def of_graph(self, number: int) -> _Copy:
        if number not in self._graphs:
            if self._spare is None:
                raise LaunchError(
                    f"{self.program} keeps weights in memory of its own, so each CUDA graph needs a copy of it, which "
                    "cannot be loaded while the graph is recorded: make the same call once just before"
                )
            self._graphs[number] = _Copy(self._spare)
            self._spare = None
        return self._graphs[number]

    def reserve(self) -> None:
        """Sees to it that a graph can be recorded."""
        if self._spare is None:
            copy = cuda.load_copy(self.program, self.device_index)
            self._spare = copy.like(self.plain().kernel, self.device_index)


_owners: dict[tuple[Program, int], _Owner] = {}


class CudaConstantLock:
    """Lets calls of a recipe's programs on a GPU take turns."""

    def __init__(self, programs: Sequence[Program], device_index: int) -> None:
        self._owners = [
            _owners.setdefault((program, device_index), _Owner(program, device_index)) for program in programs
        ]
        self._index = device_index

    @contextmanager
    def take(self) -> Iterator[ProgramCopies]:
        with ExitStack() as held:
            for owner in self._owners:  # in one order for all: programs come sorted
                held.enter_context(owner.lock)
            held.enter_context(torch.cuda.device(self._index))
            stream = torch.cuda.current_stream(self._index)
            graph = cuda.capture_id(stream)
            if graph is None:
                for owner in self._owners:
                    owner.reserve()
            copies = [owner.plain() if graph is None else owner.of_graph(graph) for owner in self._owners]
            for copy in copies:
                held.enter_context(copy.used_on(stream))
            yield {} if graph is None else {copy.kernel.program: copy.kernel for copy in copies}
