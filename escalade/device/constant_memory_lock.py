"""Mutual exclusion of calls that fill `__constant__` memory, across threads and streams.

All launches of a loaded program share its `__constant__` arrays: a call that fills one must wait until the previous
call has read it. On the twin, where calls are synchronous, a lock per program is enough. On a GPU the lock orders the
launches of threads, and an event per program orders their work on different streams.

Replays of a CUDA graph bypass these locks, so each graph gets its own copy of the program.
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
    def acquire(self) -> AbstractContextManager[ProgramCopies]:
        """Enter the critical section; yields the program copies to launch, where they are not those of `cuda.load`."""


class TwinConstantLock:
    """Lock for kernels on the twin."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._locks = [_twin_locks.setdefault(program, threading.Lock()) for program in programs]

    @contextmanager
    def acquire(self) -> Iterator[ProgramCopies]:
        with ExitStack() as held:
            for lock in self._locks:  # programs are sorted, so all threads lock in the same order
                held.enter_context(lock)
            yield {}


_twin_locks: dict[Program, threading.Lock] = {}


@dataclass
class _Copy:
    """Loaded program, with an event that marks the end of its last use."""

    kernel: cuda.CudaKernel
    done: torch.cuda.Event | None = None

    @contextmanager
    def used_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        if self.done is not None:
            stream.wait_event(self.done)
        try:
            yield
        finally:  # work enqueued before a failure still runs
            if self.done is None:
                self.done = torch.cuda.Event()
            self.done.record(stream)


@dataclass
class _Owner:
    """Copies of one program on one device."""

    program: Program
    device_index: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    _plain: _Copy | None = None
    _spare: cuda.CudaKernel | None = None
    """Copy for the next graph, loaded ahead because nothing can be loaded during capture."""
    _graphs: dict[int, _Copy] = field(default_factory=dict)
    """Copies owned by graphs, never freed: a graph may be replayed at any time."""

    def plain(self) -> _Copy:
        """Return the copy for eager launches."""
        if self._plain is None:
            self._plain = _Copy(cuda.load(self.program, self.device_index))
        return self._plain

    def of_graph(self, number: int) -> _Copy:
        if number not in self._graphs:
            if self._spare is None:
                raise LaunchError(
                    f"{self.program} keeps weights in constant memory, so each CUDA graph needs its own copy, which "
                    "cannot be loaded during capture: make the same call once just before capturing"
                )
            self._graphs[number] = _Copy(self._spare)
            self._spare = None
        return self._graphs[number]

    def reserve(self) -> None:
        """Load a spare copy, so that a graph can be captured."""
        if self._spare is None:
            copy = cuda.load_copy(self.program, self.device_index)
            self._spare = copy.like(self.plain().kernel, self.device_index)


_owners: dict[tuple[Program, int], _Owner] = {}


class CudaConstantLock:
    """Lock for the programs of a recipe on a GPU."""

    def __init__(self, programs: Sequence[Program], device_index: int) -> None:
        self._owners = [
            _owners.setdefault((program, device_index), _Owner(program, device_index)) for program in programs
        ]
        self._index = device_index

    @contextmanager
    def acquire(self) -> Iterator[ProgramCopies]:
        with ExitStack() as held:
            for owner in self._owners:  # programs are sorted, so all threads lock in the same order
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
