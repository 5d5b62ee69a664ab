"""Executables: recipes bound to tensors, on the GPU or, for CPU tensors, on the twin."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from escalade.device import cuda, twin
from escalade.device.arguments import ArgumentList, BufferPointers
from escalade.device.constant_memory_lock import (
    ConstantLock,
    CudaConstantLock,
    ProgramCopies,
    TwinConstantLock,
)
from escalade.device.graph import GraphNode
from escalade.device.program import Program
from escalade.device.recipe import ConstantCopy, KernelCall, Recipe
from escalade.device.torch_private import FAST_PATHS
from escalade.device.twin import tensor_map
from escalade.errors import LaunchError, UnsupportedError


@dataclass(frozen=True)
class TwinOptions:
    """Options of the twin: execution order, checks, counts."""

    order: twin.Order = twin.Order()
    checks: bool = False
    counts: bool = False
    unwritten: tuple[str, ...] = ()
    """Tensors that, like workspaces, the recipe must write before reading; verified with checks."""


class BoundStep(Protocol):
    def point(self, buffers: Mapping[str, int]) -> None: ...
    def __call__(self) -> None: ...


class Executable:
    """Recipe prepared for one device. `bind` sets its tensors, a call runs it.

    `bind` allocates workspaces unless it gets tensors of their names. An executable serves one thread at a time,
    because its pointers are state. Calls of recipes that fill `__constant__` memory exclude each other.
    `weights_ready`: no launch still in flight writes the weights. `release_dependents`: the next launch has CTAs that
    occupy an SM each and may start early.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        label: str = "",
        options: TwinOptions = TwinOptions(),
        weights_ready: bool = False,
        release_dependents: bool = False,
    ):
        self.recipe = recipe
        self.device = device
        self._workspaces: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._addresses: dict[str, int] = {}
        self._label = f" for {label}" if label else ""
        self._options = options
        self._flags = (weights_ready, release_dependents)
        self._steps = self._make({})
        self._recorded: tuple[ProgramCopies, list[BoundStep]] = {}, self._steps
        self._constant_lock = self._make_constant_lock() if recipe.shared_state else None
        self._synchronize = device.type == "cuda" and cuda.synchronize_after_each_launch()
        self._nodes: list[GraphNode] | None = None

    def _make_constant_lock(self) -> ConstantLock:
        programs = self.recipe.shared_state
        return (
            CudaConstantLock(programs, self._index)
            if self.device.type == "cuda"
            else TwinConstantLock(programs)
        )

    def _steps_for(self, copies: ProgramCopies) -> list[BoundStep]:
        """Return the steps for a CUDA graph that owns these program copies, created at its first capture."""
        if not copies:
            return self._steps
        if self._recorded[0] != copies:
            self._recorded = copies, self._make(copies)
        steps = self._recorded[1]
        for step in steps:
            step.point(self._addresses)
        return steps

    def _make(self, copies: ProgramCopies) -> list[BoundStep]:
        """Create the steps, using the program copies where there are any."""
        steps = [self._step(step, copies) for step in self.recipe.steps]
        for step in steps:
            if isinstance(step, cuda.CudaLaunch | _TwinLaunch):
                step.arguments.set(*self._flags)
        return steps

    def _step(self, step: KernelCall | ConstantCopy, copies: ProgramCopies) -> BoundStep:
        if self.device.type == "cuda":
            kind = cuda.CudaLaunch if isinstance(step, KernelCall) else cuda.CudaConstantCopy
            return kind(step, self._index, self._label, copies.get(step.program))  # type: ignore[arg-type]
        if self.device.type == "cpu":
            if isinstance(step, KernelCall):
                return _TwinLaunch(step, self._options, self._sizes, self._label)
            return _TwinConstantCopy(step, self._options)
        raise UnsupportedError(
            f"device {self.device} is not supported; use a CUDA device, or the CPU for the twin"
        )

    @property
    def _index(self) -> int:
        return cuda.index_of(self.device)

    def bind(self, tensors: Mapping[str, torch.Tensor | None]) -> Executable:
        """Point the launches at these tensors; None for an absent optional one."""
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        for workspace in self.recipe.workspaces:
            if workspace.name in self._tensors:
                continue
            if workspace.name not in self._workspaces:
                self._workspaces[workspace.name] = workspace.allocate(self.device)
            self._tensors[workspace.name] = self._workspaces[workspace.name]
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        if self.device.type == "cpu":  # bounds for the twin's checks
            for name, tensor in self._tensors.items():
                storage = tensor.untyped_storage()
                self._sizes[name] = (storage.data_ptr(), storage.nbytes())
        for step in self._steps:
            step.point(self._addresses)
        return self

    def counts(self, packing: bool = True) -> twin.Counts:
        """Return the counts of the last call, with or without weight packing. Needs `TwinOptions(counts=True)`."""
        steps = zip(self.recipe.steps, self._steps, strict=True)
        wanted = [step for call, step in steps if packing or not call.weights_only]
        return sum((step.counts for step in wanted if isinstance(step, _TwinLaunch)), twin.Counts())

    def release(self) -> None:
        """Drop the references to the bound tensors. Workspaces are kept."""
        self._tensors = {}

    def add_to(self, pointers: BufferPointers, name: str, offset: int = 0) -> None:
        """Register the buffer `name`, `offset` bytes into the memory of `pointers`, so that they can move it."""
        for step in self._steps:
            if isinstance(step, cuda.CudaLaunch | _TwinLaunch):
                pointers.add(step.arguments, name, offset)

    @property
    def supports_pointer_updates(self) -> bool:
        """True if, once bound, pointer updates and `launches` can replace `bind` and a call."""
        return self.device.type == "cuda" and self._constant_lock is None

    def launcher(self) -> Callable[[], None]:
        """Return the fastest function that runs this executable, whose device must be current."""
        launches = self.launches
        plain = [one for one in launches if isinstance(one, cuda.CudaLaunch) and one.is_on_main_lane]
        if not plain or len(plain) < len(launches):
            return self
        index, current_stream = self._index, FAST_PATHS.current_stream
        first, *others = [launch.enqueue for launch in plain]
        if not others:
            return lambda: first(current_stream(index))

        def launch() -> None:
            stream = current_stream(index)
            first(stream)
            for enqueue in others:
                enqueue(stream)

        return launch

    @property
    def launches(self) -> list[Callable[[], None]]:
        """The functions that a call runs, in order."""
        together = self.recipe.side_lanes or self._synchronize or self._constant_lock
        return [self] if together else list(self._steps)

    def __call__(self) -> None:
        if self._constant_lock is None:
            self._launch(self._steps)
        else:
            with self._constant_lock.acquire() as copies:
                self._launch(self._steps_for(copies))

    def _launch(self, steps: Sequence[BoundStep]) -> None:
        lanes = self.recipe.side_lanes
        if lanes and self.device.type == "cuda":
            with cuda.side_lanes(self._index, lanes):
                self._run(steps)
        else:  # the twin is synchronous
            self._run(steps)

    def _run(self, steps: Sequence[BoundStep]) -> None:
        self._declare_unwritten([step for step in steps if isinstance(step, _TwinLaunch) and step.checked])
        for step in steps:
            step()
            if self._synchronize:
                self._wait(step)
            if self._nodes is not None and isinstance(step, cuda.CudaLaunch):
                self._nodes.append(GraphNode(step, step.node()))

    @contextmanager
    def capture_nodes(self) -> Iterator[list[GraphNode]]:
        """Yield a list that collects the graph nodes of this executable's launches during a capture."""
        found: list[GraphNode] = []
        self._nodes = found
        try:
            yield found
        finally:
            self._nodes = None

    def _declare_unwritten(self, launches: Sequence[_TwinLaunch]) -> None:
        """Tell the twin's checks which memory must be written before it is read: workspaces, and `unwritten`."""
        if not launches:
            return
        names = {one.name for one in self.recipe.workspaces if not one.zeroed} - self.recipe.filled
        names |= set(self._options.unwritten)
        used = [self._tensors[name] for name in sorted(names) if name in self._tensors]
        unwritten = twin.Unwritten([(tensor.data_ptr(), tensor.nbytes) for tensor in used])
        for launch in launches:
            launch.unwritten = unwritten

    def _wait(self, step: BoundStep) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise LaunchError(f"{getattr(step, 'what', 'a copy')}: {error}") from error


def bind(
    recipe: Recipe,
    tensors: Mapping[str, torch.Tensor | None],
    label: str = "",
    options: TwinOptions = TwinOptions(),
) -> Executable:
    """Bind a recipe to tensors; their device decides where it runs."""
    devices = {tensor.device for tensor in tensors.values() if tensor is not None}
    if len(devices) != 1:
        raise UnsupportedError(f"tensors are on {sorted(map(str, devices))}; all must be on one device")
    return Executable(recipe, devices.pop(), label, options).bind(tensors)


class _TwinLaunch:
    def __init__(self, call: KernelCall, options: TwinOptions, sizes: dict[str, tuple[int, int]], label: str):
        self._call = call
        self._options = options
        self._sizes = sizes  # shared with the executable, which updates it
        self._kernel = _build(call.program, options)
        self.arguments = ArgumentList(call.arguments, tensor_map.encode)
        self.unwritten: twin.Unwritten | None = None
        self.counts = twin.Counts()
        self.what = f"running {call.program}{label} on the twin"

    @property
    def checked(self) -> bool:
        return self._options.checks

    def point(self, buffers: Mapping[str, int]) -> None:
        self.arguments.point(buffers)

    def __call__(self) -> None:
        call = self._call
        try:
            self._kernel.launch(
                call.grid,
                call.block,
                self.arguments.values,
                shared_bytes=call.shared_bytes,
                cluster=call.cluster,
                order=self._options.order,
                buffers=tuple(self._sizes.values()),
                unwritten=self.unwritten,
                overlap=call.overlap,
                weights_ready=tuple(
                    self._sizes[name] for name in self.arguments.weights_ready if name in self._sizes
                ),
            )
        except LaunchError as error:
            raise type(error)(f"{self.what}: {error}") from error
        if self._options.counts:  # read now: the next launch may use the same kernel
            self.counts = self._kernel.counts()


def _build(program: Program, options: TwinOptions) -> twin.TwinKernel:
    return twin.build(
        program.text(), program.entry, name=program.source, checks=options.checks, counts=options.counts
    )


class _TwinConstantCopy:
    def __init__(self, copy: ConstantCopy, options: TwinOptions):
        self._copy = copy
        program = copy.program
        self._target, capacity = _build(program, options).constant(copy.symbol)
        if capacity < copy.bytes:
            raise LaunchError(
                f"filling {copy.symbol} of {program}: {copy.bytes} bytes do not fit into {capacity}"
            )
        self._source = 0

    def point(self, buffers: Mapping[str, int]) -> None:
        self._source = buffers[self._copy.source.name] + self._copy.source.offset

    def __call__(self) -> None:
        ctypes.memmove(self._target, self._source, self._copy.bytes)
