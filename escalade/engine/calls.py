"""Calls of a plan: from any thread, on the caller's current stream, with results that the caller owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Protocol

import torch

from escalade.device.events import StreamMarker
from escalade.device.run import Executable
from escalade.device.strides import is_apart
from escalade.device.torch_private import FAST_PATHS
from escalade.engine.graph.forms import Form
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.io_binding import InputBinding, OutputBinding
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.launch_pointers import LaunchPointers
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import OutTensors, PlanProgram, copy_into
from escalade.errors import OutOfMemory

logger = logging.getLogger("escalade")
_NEVER = -(2**62)
_OF_LATE = 4
"""Calls for each set, in which one that is not used is free for others."""


class Calls(Protocol):
    plan: Plan

    @property
    def program(self) -> PlanProgram:
        """The plan over memory of its own."""

    def call(self, tensors: Sequence[torch.Tensor], out: OutTensors = None) -> list[torch.Tensor]:
        """One run on the current stream; its results are new tensors, or the caller's rooms for them."""


class _Buffers:
    """A program, and whose call has its buffers."""

    def __init__(self, program: PlanProgram) -> None:
        self.program = program
        self.lock = threading.Lock()
        self.stream: int | None = None
        """The stream of the last call, as a number: PyTorch says of a stream that it is not unequal to None."""
        self.turn = _NEVER
        """The number of the last call, among all of the plan's."""
        self._done: StreamMarker | None = None
        self._known: set[int] = set()

    def is_taken_idle(self, since: int) -> bool:
        """Takes the lock, unless somebody has it, a call is still running, or one has been made since that turn."""
        if self.turn > since or not self.lock.acquire(blocking=False):
            return False
        if self.turn <= since and self._is_idle():
            return True
        self.lock.release()
        return False

    def _is_idle(self) -> bool:
        return self._done is None or self._done.is_done()

    def run(
        self,
        stream: int,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        out: OutTensors,
    ) -> list[torch.Tensor]:
        """A call on the current stream; it waits for one on another. The lock is held."""
        if self.stream != stream:
            current = torch.cuda.current_stream()
            if stream not in self._known:
                self.program.record_stream(current)
                self._known.add(stream)
            if self._done is not None:
                current.wait_event(self._done.event)
            self.stream = stream
        is_idle = self._is_idle()
        if self._done is None:
            self._done = StreamMarker()
        try:
            return self.program.call(tensors, types, out)
        finally:  # also what failed half way may have begun
            self._done.record(stream, is_idle)


class BufferedCalls:
    """Calls of a program that has buffers: those on one stream follow each other in the same ones, those on others
    overlap in up to `most` sets of them, and beyond that wait for each other.

    A set is made when a call on another stream finds all others in use, or used of late: streams that took each other's
    sets in turns would have the graph's kernels pointed at their own tensors at every call.
    """

    def __init__(self, program: PlanProgram, types: Sequence[torch.dtype], most: int = 1) -> None:
        self.plan = program.plan
        self._types = types
        self._most = most
        self._sets = [_Buffers(program)]
        self._by_stream: dict[int, _Buffers] = {}
        """Which set each stream had last, if no other has taken it."""
        self._turns = count()
        self._making = threading.Lock()

    @property
    def program(self) -> PlanProgram:
        return self._sets[0].program

    def call(self, tensors: Sequence[torch.Tensor], out: OutTensors = None) -> list[torch.Tensor]:
        device = tensors[0].device
        if device.type != "cuda":
            return self._call_on_host(tensors, out)
        if FAST_PATHS.current_device() == device.index:
            return self._call_here(device.index, tensors, out)
        with torch.cuda.device(device):
            return self._call_here(device.index, tensors, out)

    def _call_here(self, index: int, tensors: Sequence[torch.Tensor], out: OutTensors) -> list[torch.Tensor]:
        """On the current device, which is the GPU of that index."""
        if FAST_PATHS.is_capturing():
            with self._sets[0].lock:
                return self.program.call_isolated(tensors, self._types, out)
        stream = FAST_PATHS.current_stream(index)
        buffers = self._taken_for(stream)
        try:
            return buffers.run(stream, tensors, self._types, out)
        finally:
            buffers.lock.release()

    def _call_on_host(self, tensors: Sequence[torch.Tensor], out: OutTensors) -> list[torch.Tensor]:
        buffers = self._taken()
        try:
            return buffers.program.call(tensors, self._types, out)
        finally:
            buffers.lock.release()

    def _taken_for(self, stream: int) -> _Buffers:
        """The set that the stream had last, or another, locked."""
        last = self._by_stream.get(stream)
        if last is not None:
            last.lock.acquire()
            if last.stream == stream:
                last.turn = next(self._turns)
                return last
            last.lock.release()
        taken = self._by_stream[stream] = self._taken(_OF_LATE * self._most)
        return taken

    def _taken(self, others: int = 0) -> _Buffers:
        """Locked: a set that is idle and was not used in the last calls, so many that are others'; or a new one, or one
        that is idle, or whichever will be, the one whose last call began first before the others."""
        turn = next(self._turns)
        longest_first = sorted(self._sets, key=lambda each: each.turn)
        found = _idle(longest_first, turn - others) or self._made() or _idle(longest_first, turn)
        if found is None:
            found = longest_first[0]
            found.lock.acquire()
        found.turn = turn
        return found

    def _made(self) -> _Buffers | None:
        """A new set, locked; none if there are enough. Who comes while another makes one takes one that there is."""
        if len(self._sets) >= self._most or not self._making.acquire(blocking=False):
            return None
        try:
            if len(self._sets) >= self._most:
                return None
            made = _Buffers(self._another())
            made.lock.acquire()
            self._sets.append(made)
            return made
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            self._most = len(self._sets)
            logger.warning("the calls of this plan share %d sets of buffers: %s", self._most, error)
            return None
        finally:
            self._making.release()

    @torch.inference_mode(False)  # its memory is used by calls in any mode
    @torch.no_grad()
    def _another(self) -> PlanProgram:
        return self.program.clone()


def _idle(sets: Sequence[_Buffers], since: int) -> _Buffers | None:
    """The first that is idle and has not been used since that turn, locked."""
    return next((each for each in sets if each.is_taken_idle(since)), None)


class HostCalls:
    """Calls on the CPU, of a program that shares nothing between them: any number at once."""

    def __init__(self, program: PlanProgram, types: Sequence[torch.dtype]) -> None:
        self.plan = program.plan
        self.program = program
        self._types = types

    def call(self, tensors: Sequence[torch.Tensor], out: OutTensors = None) -> list[torch.Tensor]:
        return self.program.call(tensors, self._types, out)


class DirectCalls:
    """A plan of few launches, which read the caller's inputs where they are and write the results that are returned.

    Results, and what lies between the kernels, come from PyTorch's allocator at each call: calls share nothing that
    they write, so they need not wait for each other. Only an input that is not as the kernels want it is copied.
    """

    def __init__(
        self, plan: Plan, constants: ConstantCache, device: torch.device, types: Sequence[torch.dtype]
    ) -> None:
        kernels = PlanKernels(plan, constants, device)
        addresses = LaunchPointers.of(kernels)
        self._launches = _launches(kernels)
        self.plan = plan
        self._device = device
        self._own_program = partial(KernelProgram, plan, constants, device)
        self._weights = kernels.weights
        self._inputs = [
            InputBinding(plan.forms[given.name], device, addresses.outside[given.name].point)
            for given in plan.graph.inputs
        ]
        self._outputs = [
            OutputBinding(plan.forms[name], device, addresses.outside[name].point)
            for name in plan.graph.outputs
        ]
        self._scratch = [
            OutputBinding(form, device, addresses.arena.point) for form in _bytes(plan.arena_bytes)
        ]
        stored = [plan.forms[name].dtype for name in plan.graph.outputs]
        self._types = None if stored == list(types) else types
        self._lock = threading.Lock()  # the arguments of a launch are one for all threads
        on_gpu = device.type == "cuda"
        self._index = device.index
        self._current_stream = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._streams = set() if on_gpu else {_no_stream(None)}

    @cached_property
    def program(self) -> PlanProgram:
        return self._own_program()

    def call(self, tensors: Sequence[torch.Tensor], out: OutTensors = None) -> list[torch.Tensor]:
        alive, results = [], []  # loops, for each comprehension or strict zip takes longer than its work
        with self._lock:
            for given, tensor in zip(self._inputs, tensors):  # noqa: B905
                alive.append(given.bind(tensor))
            if out is None:
                for made in self._outputs:
                    results.append(made.allocate())
            else:
                for made, tensor in zip(self._outputs, out, strict=True):
                    results.append(made.bind(tensor) if is_apart(tensor, tensors) else made.allocate())
            for made in self._scratch:
                alive.append(made.allocate())
            if self._current_stream(self._index) not in self._streams:
                self._use_on_current_stream()
            for launch in self._launches:
                launch()
        if out is not None:
            return copy_into(out, results)
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


def _launches(kernels: PlanKernels) -> list[Callable[[], None]]:
    launches: list[Callable[[], None]] = []
    for executable in kernels.calls:
        assert isinstance(executable, Executable), "PyTorch's steps are not run directly"
        executable.release()
        launches += executable.launches
    return launches


def _bytes(number: int) -> list[Form]:
    """Forms of that many bytes, or none at all."""
    return [Form((number,), torch.uint8, "flat")] if number else []
