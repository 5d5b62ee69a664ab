"""What a rung does for one problem, as data: kernel launches over named buffers.

Nothing here touches a processor. `escalade.device.run.bind` turns a recipe and tensors into something
that runs: on the GPU for CUDA tensors, on the twin for CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from escalade.device.program import Program

Size3 = tuple[int, int, int]
HALF_SM_SHARED_BYTES = 114 * 1024
"""Half of the shared memory of a multiprocessor of Hopper."""
HALF_SM_COUNT = 66
"""Half of an H200's multiprocessors."""


@dataclass(frozen=True)
class Buffer:
    """The address of a tensor or workspace of that name, moved on by `offset` bytes.

    A buffer that is not there (an absent bias) is passed as a null pointer if `optional`.
    """

    name: str
    offset: int = 0
    optional: bool = False


@dataclass(frozen=True)
class Int64:
    value: int


@dataclass(frozen=True)
class Ints:
    """A struct of 32-bit integers, passed by value."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Addresses:
    """A struct of the addresses of many buffers, passed by value: a table that needs no memory of its own."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class TiledMap:
    """A tensor map for boxes of a tensor; everything innermost dimension first.

    Loads outside the tensor give zeros, stores there are dropped.
    """

    buffer: Buffer
    element: str
    """The element type's name: fp16, bf16, fp32, tf32, fp8 or uint8."""
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    """Bytes within which 16-byte chunks change places: 0, 32, 64 or 128."""
    strides: tuple[int, ...] = ()
    """Bytes from one element to the next along every dimension but the innermost, in any order; empty: it is dense."""


@dataclass(frozen=True)
class Im2colMap:
    """A tensor map that walks the output pixels of a convolution over an NHWC tensor."""

    buffer: Buffer
    element: str
    sizes: tuple[int, int, int, int]
    """The sizes of the tensor: C, W, H, N."""
    lower: tuple[int, int]
    """The window's corner in the first pixel, relative to the image (w, h): minus the padding."""
    upper: tuple[int, int]
    """The window's corner in the last pixel, relative to the image's last row and column: padding - (filter - 1)."""
    channels: int
    pixels: int
    stride: tuple[int, int]
    swizzle: int = 128
    pitch: int = 0
    """Bytes from one pixel to the next; 0: the tensor is dense."""


@dataclass(frozen=True)
class WeightsReady:
    """A 32-bit integer: 1 where weights were written before the launch in front began, as in the plan of a network.

    A kernel may then read them without waiting for that launch; all else waits.
    """

    weights: tuple[str, ...] = ("weight",)
    """The names of the buffers that the kernel takes it for, and no others."""


@dataclass(frozen=True)
class ReleaseDependents:
    """A 32-bit integer: 1 where the launch behind may be let in before this one has finished.

    That is where its blocks have a multiprocessor each: many smaller ones would crowd onto those that are free first.
    """


TensorMap = TiledMap | Im2colMap
Argument = (
    Buffer | Addresses | int | Int64 | float | Ints | TiledMap | Im2colMap | WeightsReady | ReleaseDependents
)


def _buffers_of(argument: Argument) -> tuple[Buffer, ...]:
    """The buffers that an argument points into."""
    match argument:
        case Buffer():
            return (argument,)
        case Addresses(buffers):
            return buffers
        case TiledMap() | Im2colMap():
            return (argument.buffer,)
        case _:
            return ()


@dataclass(frozen=True)
class KernelCall:
    """One launch. A plain int argument is 32-bit, a float is a C float."""

    program: Program
    grid: Size3
    block: Size3
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    """Bytes of dynamic shared memory."""
    cluster: Size3 = (1, 1, 1)
    overlap: bool = False
    """Programmatic dependent launch: may start before the launch in front of it has finished.

    For kernels that call `wait_for_previous_launch` before they touch what another kernel writes or reads.
    """
    weights_only: bool = False
    """Depends on nothing but the weights, so it can be done once (`escalade.device.packing`)."""
    lane: int = 0
    """Launches of one lane follow each other, those of different lanes may overlap.

    Every lane begins after what was launched before the recipe, and the recipe has ended when all of them have.
    """

    @property
    def buffers(self) -> frozenset[str]:
        """The names of the buffers that it reads or writes."""
        return frozenset(buffer.name for one in self.arguments for buffer in _buffers_of(one))


@dataclass(frozen=True)
class ConstantCopy:
    """Fills a `__constant__` array of a program from a buffer before the launches that read it.

    The array belongs to the loaded program, not to the call: whoever calls next fills it anew. So it is never done
    once for many calls, and calls of a recipe with such a step take turns (`Recipe.shared_state`).
    """

    program: Program
    symbol: str
    source: Buffer
    bytes: int
    weights_only: ClassVar[bool] = False

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset((self.source.name,))


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that a recipe needs; it holds nothing before the first launch."""

    name: str
    bytes: int
    zeroed: bool = False
    """All zeros before the first launch, and left so by the last: counters that blocks meet at."""

    def allocate(self, device: torch.device) -> torch.Tensor:
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Recipe:
    steps: tuple[KernelCall | ConstantCopy, ...]
    workspaces: tuple[Workspace, ...] = ()
    filled: frozenset[str] = frozenset()
    """Workspaces that another recipe has written before: packed weights."""

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return tuple(dict.fromkeys(step.program for step in self.steps))

    @cached_property
    def shared_state(self) -> tuple[Program, ...]:
        """The programs whose own memory a call writes: all who launch them share it, so calls have to take turns.

        Nothing that is chosen without being named has any. What a kernel itself writes lies in buffers and workspaces,
        which are the call's: no kernel has variables of its own that it writes.
        """
        filled = {step.program for step in self.steps if isinstance(step, ConstantCopy)}
        return tuple(sorted(filled, key=str))

    @cached_property
    def side_lanes(self) -> tuple[int, ...]:
        """The lanes besides 0, which is the stream that the recipe is launched on."""
        return tuple(sorted({step.lane for step in self.steps if isinstance(step, KernelCall)} - {0}))

    @cached_property
    def packing(self) -> Recipe:
        """The steps that depend on nothing but weights, over the same workspaces."""
        return Recipe(tuple(step for step in self.steps if step.weights_only), self.workspaces)

    @cached_property
    def after_packing(self) -> Recipe:
        """The steps that depend on more than weights, over the same workspaces."""
        steps = tuple(step for step in self.steps if not step.weights_only)
        return Recipe(
            steps, self.workspaces, self.filled | {one.name for one in self.lasting if not one.zeroed}
        )

    @cached_property
    def lasting(self) -> tuple[Workspace, ...]:
        """The workspaces that keep what they hold from call to call: packed weights, and counters."""
        packed = frozenset[str]().union(*(step.buffers for step in self.packing.steps))
        return tuple(one for one in self.workspaces if one.zeroed or one.name in packed)

    @property
    def launches_early_after_packing(self) -> bool:
        """Whether the blocks of its first launch, weights packed, have a multiprocessor each, or are so few that it
        does not matter."""
        return self.after_packing.launches_early

    @property
    def launches_early(self) -> bool:
        """Whether that is so of its first launch of all."""
        first = next((step for step in self.steps if isinstance(step, KernelCall)), None)
        if first is None:
            return False
        return first.shared_bytes > HALF_SM_SHARED_BYTES or math.prod(first.grid) <= HALF_SM_COUNT

    @property
    def workspace_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.workspaces)

    def remap(self, buffers: Mapping[str, Buffer], lane: int = 0) -> Recipe:
        """These launches in another lane, over other buffers: those of these names, workspaces among them."""

        def moved(buffer: Buffer) -> Buffer:
            to = buffers.get(buffer.name)
            return buffer if to is None else replace(buffer, name=to.name, offset=to.offset + buffer.offset)

        def argument(one: Argument) -> Argument:
            if isinstance(one, Buffer):
                return moved(one)
            if isinstance(one, Addresses):
                return Addresses(tuple(map(moved, one.buffers)))
            if isinstance(one, WeightsReady):
                return WeightsReady(tuple(moved(Buffer(name)).name for name in one.weights))
            return replace(one, buffer=moved(one.buffer)) if isinstance(one, TiledMap | Im2colMap) else one

        def step(one: KernelCall | ConstantCopy) -> KernelCall | ConstantCopy:
            if isinstance(one, ConstantCopy):
                return replace(one, source=moved(one.source))
            return replace(one, arguments=tuple(map(argument, one.arguments)), lane=lane)

        workspaces = (replace(one, name=moved(Buffer(one.name)).name) for one in self.workspaces)
        filled = frozenset(moved(Buffer(name)).name for name in self.filled)
        return Recipe(tuple(map(step, self.steps)), tuple(workspaces), filled)
