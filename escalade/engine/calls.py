"""Calls of a plan: from any thread, on the caller's current stream, with results that the caller owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol

import torch

from escalade.device.arguments import Pointers
from escalade.device.run import Executable
from escalade.engine.constants import Constants
from escalade.engine.forms import Form
from escalade.engine.plan import Plan, Step
from escalade.engine.program import KernelProgram, Kernels, Program

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
        forms = [plan.forms[name] for name in plan.graph.outputs]
        self.plan = plan
        self._device = device
        self._own_program = partial(KernelProgram, plan, constants, device)
        self._weights = kernels.weights
        self._inputs = [_Given(plan.forms[given.name], device) for given in plan.graph.inputs]
        self._rooms = [_room(form, device) for form in forms]
        if plan.scratch_bytes:
            self._rooms.append(_room(Form((plan.scratch_bytes,), torch.uint8, "flat"), device))
        self._results = len(forms)
        self._types = None if [form.dtype for form in forms] == list(types) else types
        self._pointers, self._launches = _launches(kernels)
        self._lock = threading.Lock()  # the arguments of a launch are one for all threads
        on_gpu = device.type == "cuda"
        self._index = device.index
        self._current_stream = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self._streams = set() if on_gpu else {_no_stream(None)}

    @cached_property
    def program(self) -> Program:
        return self._own_program()

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        memory = [given.take(tensor) for given, tensor in zip(self._inputs, tensors, strict=True)]
        results = [make() for make in self._rooms]
        memory += results
        with self._lock:
            for pointers, tensor in zip(self._pointers, memory, strict=True):
                pointers.point(tensor.data_ptr())
            if self._current_stream(self._index) not in self._streams:
                self._use_on_current_stream()
            for launch in self._launches:
                launch()
        del results[self._results :]
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


def _launches(kernels: Kernels) -> tuple[list[Pointers], list[Callable[[], None]]]:
    """Of each input, each output and the scratch memory, in this order, the pointers to it; and the launches."""
    plan = kernels.plan
    outside = {name: Pointers() for name in (*(g.name for g in plan.graph.inputs), *plan.graph.outputs)}
    scratch = Pointers()
    launches: list[Callable[[], None]] = []

    def place(step: Step, executable: Executable) -> None:
        values = {**step.node.inputs, "y": step.node.name}
        for role, name in values.items():
            if name in plan.outside:
                executable.add_to(outside[plan.outside[name]], role)
            elif name not in plan.graph.constants:
                executable.add_to(scratch, role, plan.places[name])
        for workspace in executable.recipe.workspaces:
            name = step.workspace_name(workspace)
            if name not in plan.lasting:
                executable.add_to(scratch, workspace.name, plan.places[name])

    for step, executable in zip((s for s in plan.steps if not s.is_alias), kernels.calls, strict=True):
        assert isinstance(executable, Executable), "PyTorch's steps are not run directly"
        place(step, executable)
        executable.release()
        launches += executable.launches
    return [*outside.values(), *([scratch] if plan.scratch_bytes else [])], launches


class _Given:
    """An input as the kernels want it."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self._dtype = form.dtype
        self._is_dense = _is_channels_last if form.layout == "nhwc" else torch.Tensor.is_contiguous
        self._make = _room(form, device)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Itself, or a copy: of another type or order, in the midst of another, or negative only by a mark on it."""
        if (
            tensor.dtype is self._dtype
            and self._is_dense(tensor)
            and tensor.data_ptr() % _ALIGNMENT == 0
            and not tensor.is_neg()
        ):
            return tensor
        return self._make().copy_(tensor.detach())


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _room(form: Form, device: torch.device) -> Callable[[], torch.Tensor]:
    """Makes an empty tensor of the form."""
    like = form.view(torch.empty(form.bytes, dtype=torch.uint8, device="meta"), 0)
    return partial(torch.empty_strided, tuple(like.shape), like.stride(), dtype=form.dtype, device=device)
