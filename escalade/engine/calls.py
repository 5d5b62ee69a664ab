"""Calls of a plan: from any thread, on the caller's current stream, with results that the caller owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol

import torch

from escalade.device.run import Executable
from escalade.engine.graph.forms import Form
from escalade.engine.plan.caller import Given, Made
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import Addresses, KernelProgram, Kernels, Program


class Calls(Protocol):
    plan: Plan

    @property
    def program(self) -> Program:
        """The plan over memory of its own."""

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One run on the current stream."""


class BufferedCalls:
    """A program and the order of its calls: it has one set of buffers, so one call waits for another."""

    def __init__(self, program: Program, types: Sequence[torch.dtype]) -> None:
        self.plan = program.plan
        self.program = program
        self._types = types
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = tensors[0].device
        if device.type != "cuda":
            with self._lock:
                return self.program.over(tensors, self._types)
        with self._lock, torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return self.program.apart(tensors, self._types)
            stream = torch.cuda.current_stream(device)
            if self._stream != stream:
                self.program.used_on(stream)
                if self._done is not None:
                    stream.wait_event(self._done)
            results = self.program.over(tensors, self._types)
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(stream)
            self._stream = stream
            return results


class DirectCalls:
    """A plan of few launches, which read the caller's inputs where they are and write the results that are returned.

    Results, and what lies between the kernels, come from PyTorch's allocator at each call: calls share nothing that
    they write, so they need not wait for each other. Only an input that is not as the kernels want it is copied.
    """

    def __init__(
        self, plan: Plan, constants: Constants, device: torch.device, types: Sequence[torch.dtype]
    ) -> None:
        kernels = Kernels(plan, constants, device)
        addresses = Addresses.of(kernels)
        self._launches = _launches(kernels)
        self.plan = plan
        self._device = device
        self._own_program = partial(KernelProgram, plan, constants, device)
        self._weights = kernels.weights
        self._inputs = [
            Given(plan.forms[given.name], device, addresses.outside[given.name].point)
            for given in plan.graph.inputs
        ]
        self._outputs = [
            Made(plan.forms[name], device, addresses.outside[name].point) for name in plan.graph.outputs
        ]
        self._scratch = [Made(form, device, addresses.arena.point) for form in _bytes(plan.arena_bytes)]
        stored = [plan.forms[name].dtype for name in plan.graph.outputs]
        self._types = None if stored == list(types) else types
        self._lock = threading.Lock()  # the arguments of a launch are one for all threads
        on_gpu = device.type == "cuda"
        self._index = device.index
        self._current_stream = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._streams = set() if on_gpu else {_no_stream(None)}

    @cached_property
    def program(self) -> Program:
        return self._own_program()

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        alive, results = [], []  # loops, for each comprehension or strict zip takes longer than its work
        with self._lock:
            for given, tensor in zip(self._inputs, tensors):  # noqa: B905
                alive.append(given.take(tensor))
            for room in self._outputs:
                results.append(room.make())
            for room in self._scratch:
                alive.append(room.make())
            if self._current_stream(self._index) not in self._streams:
                self._use_on_current_stream()
            for launch in self._launches:
                launch()
        if self._types is None:
            return results
        return [result.to(dtype) for result, dtype in zip(results, self._types, strict=True)]

    def _use_on_current_stream(self) -> None:
        """Whoever drops the engine need not wait for it: its weights are not given away while the stream reads them.

        Once for each stream; but of what is said while a graph is recorded, PyTorch's allocator forgets the most.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            for tensor in self._weights:
                tensor.record_stream(stream)
            if not torch.cuda.is_current_stream_capturing():
                self._streams.add(stream.cuda_stream)


def _no_stream(index: int | None) -> int:
    return 0


def _launches(kernels: Kernels) -> list[Callable[[], None]]:
    launches: list[Callable[[], None]] = []
    for executable in kernels.calls:
        assert isinstance(executable, Executable), "PyTorch's steps are not run directly"
        executable.release()
        launches += executable.launches
    return launches


def _bytes(number: int) -> list[Form]:
    """Forms of that many bytes, or none at all."""
    return [Form((number,), torch.uint8, "flat")] if number else []
