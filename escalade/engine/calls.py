"""Calls of a plan from any thread, on the caller's current stream, with results that the caller owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Protocol

import torch

from escalade.device.run import Executable
from escalade.device.streams import StreamMarker
from escalade.device.strides import is_disjoint
from escalade.device.torch_private import FAST_PATHS
from escalade.engine.graph.forms import Form
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.io_binding import InputBinding, LaunchPointers, OutputBinding
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import BufferedProgram, OutTensors, PlanProgram, Tensors, copy_into
from escalade.errors import OutOfMemory

logger = logging.getLogger("escalade")
_NEVER_CALLED = -(2**62)
_RECENT_CALLS_PER_SET = 4
"""A set may move to another stream if it was not used in the last `this × number of sets` calls."""


class Calls(Protocol):
    plan: Plan

    @property
    def program(self) -> PlanProgram:
        """The plan on memory of its own."""

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        """Run on the current stream and return the results: new tensors, or `out`."""

    def repack(self) -> None:
        """Pack the weights again, after the constants were written to. No call may be in flight."""


class _BufferSet:
    """A program with its buffers, and the stream that used them last."""

    def __init__(self, program: BufferedProgram) -> None:
        self.program = program
        self.lock = threading.Lock()
        self.stream: int | None = None
        """Handle of the last call's stream. Not a Stream object: comparing one with None returns False for `!=`."""
        self.last_call = _NEVER_CALLED
        """Number of the last call, counted over all of the plan's sets."""
        self._done: StreamMarker | None = None
        self._recorded_streams: set[int] = set()

    def try_lock_idle(self, since: int) -> bool:
        """Acquire the lock if it is free, no call is in flight, and the last call is not after number `since`."""
        if self.last_call > since or not self.lock.acquire(blocking=False):
            return False
        if self.last_call <= since and self._is_idle():
            return True
        self.lock.release()
        return False

    def _is_idle(self) -> bool:
        return self._done is None or self._done.is_done()

    def run(self, stream: int, tensors: Tensors, out: OutTensors) -> list[torch.Tensor]:
        """Run on the current stream, after any call in flight on another stream. The caller holds the lock."""
        if self.stream != stream:
            current = torch.cuda.current_stream()
            if stream not in self._recorded_streams:
                self.program.record_stream(current)
                self._recorded_streams.add(stream)
            if self._done is not None:
                current.wait_event(self._done.event)
            self.stream = stream
        is_idle = self._is_idle()
        if self._done is None:
            self._done = StreamMarker()
        try:
            return self.program.call(tensors, out)
        finally:  # a call that failed half way may have enqueued work, too
            self._done.record(stream, is_idle)


class BufferedCalls:
    """Calls of a program with buffers. Calls on one stream share a set. Calls on different streams overlap in up to
    `limit` sets; further calls wait for a set.

    A set is created when a call on a new stream finds all others busy or recently used. Streams that alternated on one
    set would have to rebind the graph's kernels to their own tensors at every call.
    """

    def __init__(self, program: BufferedProgram, limit: int = 1) -> None:
        self.plan = program.plan
        self._limit = limit
        self._sets = [_BufferSet(program)]
        self._by_stream: dict[int, _BufferSet] = {}
        """The set each stream used last; another stream may have taken it since."""
        self._call_numbers = count()
        self._creating = threading.Lock()

    @property
    def program(self) -> BufferedProgram:
        return self._sets[0].program

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        device = tensors[0].device
        if device.type != "cuda":
            return self._call_on_host(tensors, out)
        if FAST_PATHS.current_device() == device.index:
            return self._call_on_device(device.index, tensors, out)
        with torch.cuda.device(device):
            return self._call_on_device(device.index, tensors, out)

    def repack(self) -> None:
        self.program.repack()  # the other sets share its packed weights

    def _call_on_device(self, index: int, tensors: Tensors, out: OutTensors) -> list[torch.Tensor]:
        if FAST_PATHS.is_capturing():
            with self._sets[0].lock:
                return self.program.call_isolated(tensors, out)
        stream = FAST_PATHS.current_stream(index)
        buffers = self._acquire_for(stream)
        try:
            return buffers.run(stream, tensors, out)
        finally:
            buffers.lock.release()

    def _call_on_host(self, tensors: Tensors, out: OutTensors) -> list[torch.Tensor]:
        buffers = self._acquire()
        try:
            return buffers.program.call(tensors, out)
        finally:
            buffers.lock.release()

    def _acquire_for(self, stream: int) -> _BufferSet:
        """Lock and return the set that the stream used last, or another."""
        last = self._by_stream.get(stream)
        if last is not None:
            last.lock.acquire()
            if last.stream == stream:
                last.last_call = next(self._call_numbers)
                return last
            last.lock.release()
        acquired = self._by_stream[stream] = self._acquire(_RECENT_CALLS_PER_SET * self._limit)
        return acquired

    def _acquire(self, recent: int = 0) -> _BufferSet:
        """Lock and return, in order of preference: an idle set not used in the last `recent` calls, a new set, any idle
        set, or the least recently used set once it is free."""
        number = next(self._call_numbers)
        oldest_first = sorted(self._sets, key=lambda each: each.last_call)
        found = (
            _lock_first_idle(oldest_first, number - recent)
            or self._create()
            or _lock_first_idle(oldest_first, number)
        )
        if found is None:
            found = oldest_first[0]
            found.lock.acquire()
        found.last_call = number
        return found

    def _create(self) -> _BufferSet | None:
        """Create and lock a new set. Returns None at the limit, or if another thread is already creating one."""
        if len(self._sets) >= self._limit or not self._creating.acquire(blocking=False):
            return None
        try:
            if len(self._sets) >= self._limit:
                return None
            created = _BufferSet(self._clone_program())
            created.lock.acquire()
            self._sets.append(created)
            return created
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            self._limit = len(self._sets)
            logger.warning("the calls of this plan share %d sets of buffers: %s", self._limit, error)
            return None
        finally:
            self._creating.release()

    @torch.inference_mode(False)  # its buffers must be usable in and out of inference mode
    @torch.no_grad()
    def _clone_program(self) -> BufferedProgram:
        return self.program.clone()


def _lock_first_idle(sets: Sequence[_BufferSet], since: int) -> _BufferSet | None:
    """Lock and return the first set that is idle and was last used by call number `since` or before."""
    return next((each for each in sets if each.try_lock_idle(since)), None)


class DirectCalls:
    """A plan of a few launches that read the caller's inputs and write the returned results directly.

    Results and scratch memory come from PyTorch's allocator at each call, so calls share nothing that they write and
    never wait for each other. Inputs are only copied if kernels cannot read their layout.
    """

    def __init__(self, plan: Plan, constants: ConstantCache, device: torch.device) -> None:
        kernels = PlanKernels(plan, constants, device)
        pointers = LaunchPointers.of(kernels)
        self._launches = _launches(kernels)
        self.plan = plan
        self._device = device
        self._own_program = partial(KernelProgram, plan, constants, device)
        self._weights = kernels.weights
        self._repack = kernels.repacking()
        self._inputs = [
            InputBinding(plan.forms[entry.name], device, pointers.outside[entry.name].point)
            for entry in plan.graph.inputs
        ]
        self._outputs = [
            OutputBinding(plan.forms[name], device, pointers.outside[name].point)
            for name in plan.graph.outputs
        ]
        self._scratch = [
            OutputBinding(form, device, pointers.arena.point) for form in _byte_forms(plan.arena_bytes)
        ]
        stored = tuple(plan.forms[name].dtype for name in plan.graph.outputs)
        self._converted_dtypes = None if stored == plan.output_dtypes else plan.output_dtypes
        self._lock = threading.Lock()  # all threads share the argument buffers of the launches
        on_gpu = device.type == "cuda"
        self._index = device.index
        self._current_stream = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._streams = set() if on_gpu else {_no_stream(None)}

    @cached_property
    def program(self) -> PlanProgram:
        return self._own_program()

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        # Plain loops: on this hot path a comprehension or a strict zip costs more than its work.
        alive, results = [], []
        with self._lock:
            for binding, tensor in zip(self._inputs, tensors):  # noqa: B905
                alive.append(binding.bind(tensor))
            if out is None:
                for output in self._outputs:
                    results.append(output.allocate())
            else:
                for output, tensor in zip(self._outputs, out, strict=True):
                    results.append(output.bind(tensor) if is_disjoint(tensor, tensors) else output.allocate())
            for output in self._scratch:
                alive.append(output.allocate())
            if self._current_stream(self._index) not in self._streams:
                self._record_current_stream()
            for launch in self._launches:
                launch()
        if out is not None:
            return copy_into(out, results)
        if self._converted_dtypes is None:
            return results
        return [result.to(dtype) for result, dtype in zip(results, self._converted_dtypes, strict=True)]

    def repack(self) -> None:
        self._repack()
        if "program" in vars(self):
            self.program.repack()

    def _record_current_stream(self) -> None:
        """Keep the caching allocator from reusing the weights while the current stream reads them.

        Once per stream, except during CUDA graph capture, where the allocator drops most of these records.
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
        assert isinstance(executable, Executable), "direct calls have no PyTorch steps"
        executable.release()
        launches += executable.launches
    return launches


def _byte_forms(number: int) -> list[Form]:
    return [Form((number,), torch.uint8, "flat")] if number else []
