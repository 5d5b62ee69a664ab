"""Calls of a plan: from any thread, on the caller's current stream, with results that the caller owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol

import torch

from escalade.device.arguments import Pointers
from escalade.device.run import Executable
from escalade.engine.graph.forms import Form
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import KernelProgram, Kernels, Program

_ALIGNMENT = 16
"""Kernels load 16 bytes at a time."""


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
                return self._run(tensors)
        with self._lock, torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            if self._stream != stream:
                self.program.used_on(stream)
                if self._done is not None:
                    stream.wait_event(self._done)
            results = self._run(tensors)
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(stream)
            self._stream = stream
            return results

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for room, tensor in zip(self.program.inputs, tensors, strict=True):
            room.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)
        self.program.run()
        outputs = zip(self.program.outputs, self._types, strict=True)
        return [output.to(dtype, copy=True) for output, dtype in outputs]


class DirectCalls:
    """A plan of few launches, which read the caller's inputs where they are and write the results that are returned.

    Results, and what lies between the kernels, come from PyTorch's allocator at each call: calls share nothing that
    they write, so they need not wait for each other. Only an input that is not as the kernels want it is copied.
    """

    def __init__(
        self, plan: Plan, constants: Constants, device: torch.device, types: Sequence[torch.dtype]
    ) -> None:
        kernels = Kernels(plan, constants, device)
        pointers, scratch, self._launches = _launches(kernels)
        forms = {name: plan.forms[name] for name in pointers}
        self.plan = plan
        self._device = device
        self._own_program = partial(KernelProgram, plan, constants, device)
        self._weights = kernels.weights
        self._inputs = [
            _Given(forms[given.name], device, pointers[given.name]) for given in plan.graph.inputs
        ]
        self._outputs = [_Made(forms[name], device, pointers[name]) for name in plan.graph.outputs]
        self._scratch = [_Made(form, device, scratch) for form in _bytes(plan.scratch_bytes)]
        stored = [forms[name].dtype for name in plan.graph.outputs]
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


def _launches(kernels: Kernels) -> tuple[dict[str, Pointers], Pointers, list[Callable[[], None]]]:
    """The pointers to each input and output, those to scratch memory, and the launches."""
    plan = kernels.plan
    outside = {name: Pointers() for name in (*(g.name for g in plan.graph.inputs), *plan.graph.outputs)}
    scratch = Pointers()
    launches: list[Callable[[], None]] = []
    for step, executable in zip((s for s in plan.steps if not s.is_alias), kernels.calls, strict=True):
        assert isinstance(executable, Executable), "PyTorch's steps are not run directly"
        for role, name in {**step.node.inputs, "y": step.node.name}.items():
            if name in plan.outside:
                executable.add_to(outside[plan.outside[name]], role)
            elif name not in plan.graph.constants:
                executable.add_to(scratch, role, plan.places[name])
        for workspace in executable.recipe.workspaces:
            name = step.workspace_name(workspace)
            if name not in plan.lasting:
                executable.add_to(scratch, workspace.name, plan.places[name])
        executable.release()
        launches += executable.launches
    return outside, scratch, launches


class _Given:
    """An input as the kernels want it."""

    def __init__(self, form: Form, device: torch.device, pointers: Pointers) -> None:
        self._dtype = form.dtype
        self._is_dense = _is_channels_last if form.layout == "nhwc" else torch.Tensor.is_contiguous
        self._copy = _Made(form, device, pointers)
        self._point = pointers.point

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The launches read it, or a copy: of one of another type or order, that lies in the midst of another, or whose
        elements are negative by nothing but a mark on it.
        """
        address = tensor.data_ptr()
        if (
            tensor.dtype is self._dtype
            and self._is_dense(tensor)
            and not address % _ALIGNMENT
            and not tensor.is_neg()
        ):
            self._point(address)
            return tensor
        return self._copy.make().copy_(tensor.detach())


class _Made:
    """Memory that the launches are pointed at, new at each call."""

    def __init__(self, form: Form, device: torch.device, pointers: Pointers) -> None:
        like = form.view(torch.empty(form.bytes, dtype=torch.uint8, device="meta"), 0)
        self._empty = partial(
            torch.empty_strided, tuple(like.shape), like.stride(), dtype=form.dtype, device=device
        )
        self._point = pointers.point

    def make(self) -> torch.Tensor:
        made = self._empty()
        self._point(made.data_ptr())
        return made


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _bytes(number: int) -> list[Form]:
    """Forms of that many bytes, or none at all."""
    return [Form((number,), torch.uint8, "flat")] if number else []
