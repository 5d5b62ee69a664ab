"""Recipes: the kernel launches of a rung for one problem, as data over named buffers.

`escalade.device.run.bind` makes a recipe executable: on the GPU for CUDA tensors, on the twin for CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.sources import struct

Size3 = tuple[int, int, int]
HALF_SM_SHARED_BYTES = 114 * 1024
"""Half of the shared memory of a Hopper SM: CTAs that use more have an SM to themselves."""
HALF_SM_COUNT = 66
"""Half of an H200's 132 SMs."""


@dataclass(frozen=True)
class Buffer:
    """Address of the tensor or workspace of that name, plus `offset` bytes.

    If `optional`, a missing buffer (such as an absent bias) is passed as a null pointer.
    """

    name: str
    offset: int = 0
    optional: bool = False


@dataclass(frozen=True)
class Int64:
    value: int


@dataclass(frozen=True)
class Ints:
    """Struct of 32-bit integers, passed by value."""

    values: tuple[int, ...]

    @staticmethod
    def of(header: str, name: str, **scope: Any) -> Ints:
        """Return a struct that a header declares, its fields evaluated over `scope` (`escalade/device/sources.py`)."""
        return Ints(struct(header, name, scope))


@dataclass(frozen=True)
class Addresses:
    """Struct of buffer addresses, passed by value: a table that needs no device memory."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class TiledMap:
    """TMA tensor map for boxes of a tensor; all fields are innermost dimension first.

    Loads outside the tensor return zeros, stores there are dropped.
    """

    buffer: Buffer
    element: str
    """Element type: fp16, bf16, fp32, tf32, fp8, int8 or uint8."""
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    """Swizzle span in bytes: 0, 32, 64 or 128."""
    strides: tuple[int, ...] = ()
    """Strides in bytes of all dimensions but the innermost, in any order; empty for a dense tensor."""


@dataclass(frozen=True)
class Im2colMap:
    """TMA im2col tensor map, which walks the output pixels of a convolution over an NHWC or NDHWC tensor."""

    buffer: Buffer
    element: str
    sizes: tuple[int, ...]
    """Sizes of the tensor: C, W, H, N, or C, W, H, D, N."""
    lower: tuple[int, ...]
    """Lower bounding-box corner (w, h), or (w, h, d): minus the padding."""
    upper: tuple[int, ...]
    """Upper bounding-box corner, relative to the last row and column: padding - (filter - 1)."""
    channels: int
    pixels: int
    stride: tuple[int, ...]
    swizzle: int = 128
    pitch: int = 0
    """Bytes per pixel step; 0 for a dense tensor."""


@dataclass(frozen=True)
class WeightsReady:
    """32-bit flag: 1 if the weights were written before the previous launch started, as in the plan of a network.

    The kernel may then read them before `wait_for_previous_launch`; everything else must wait.
    """

    weights: tuple[str, ...] = ("weight",)
    """Names of the buffers that the kernel reads early."""


@dataclass(frozen=True)
class ReleaseDependents:
    """32-bit flag: 1 if the next launch may start before this one has finished.

    Set where its CTAs occupy an SM each. Many smaller CTAs would crowd onto the SMs that become free first.
    """


TensorMap = TiledMap | Im2colMap
Argument = (
    Buffer | Addresses | int | Int64 | float | Ints | TiledMap | Im2colMap | WeightsReady | ReleaseDependents
)


def _buffers_of(argument: Argument) -> tuple[Buffer, ...]:
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
    """One kernel launch. A plain int argument is 32-bit, a float is a C float."""

    program: Program
    grid: Size3
    block: Size3
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    """Bytes of dynamic shared memory."""
    cluster: Size3 = (1, 1, 1)
    overlap: bool = False
    """Programmatic dependent launch: may start before the previous launch has finished.

    The kernel must call `wait_for_previous_launch` before it touches what another kernel writes or reads.
    """
    weights_only: bool = False
    """True if it depends on weights alone and can run once (`escalade.device.packing`)."""
    lane: int = 0
    """Launches of the same lane run in order; different lanes may overlap.

    All lanes start after the work before the recipe, and the recipe ends when all lanes have.
    """

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the buffers that it reads or writes."""
        return frozenset(buffer.name for one in self.arguments for buffer in _buffers_of(one))


@dataclass(frozen=True)
class ConstantCopy:
    """Copy from a buffer to a `__constant__` array of a program, before the launches that read it.

    The array belongs to the loaded program and the next call overwrites it. So every call repeats the copy, and calls
    of such recipes exclude each other (`Recipe.shared_state`).
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
    """Scratch memory of a recipe, uninitialized before the first launch."""

    name: str
    bytes: int
    zeroed: bool = False
    """True if the recipe expects zeros and leaves zeros: counters for synchronization between CTAs."""

    def allocate(self, device: torch.device) -> torch.Tensor:
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Recipe:
    steps: tuple[KernelCall | ConstantCopy, ...]
    workspaces: tuple[Workspace, ...] = ()
    filled: frozenset[str] = frozenset()
    """Workspaces already written by another recipe: packed weights."""

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return tuple(dict.fromkeys(step.program for step in self.steps))

    @cached_property
    def shared_state(self) -> tuple[Program, ...]:
        """Programs whose `__constant__` memory a call writes, so that calls must exclude each other.

        Only rungs requested by name have any: automatic choice skips them. Kernels write to buffers and workspaces
        alone, never to their own global variables.
        """
        filled = {step.program for step in self.steps if isinstance(step, ConstantCopy)}
        return tuple(sorted(filled, key=str))

    @cached_property
    def side_lanes(self) -> tuple[int, ...]:
        """Lanes other than 0, which is the stream that the recipe is launched on."""
        return tuple(sorted({step.lane for step in self.steps if isinstance(step, KernelCall)} - {0}))

    @cached_property
    def packing(self) -> Recipe:
        """Steps that depend on weights alone, over the same workspaces."""
        return Recipe(tuple(step for step in self.steps if step.weights_only), self.workspaces)

    @cached_property
    def after_packing(self) -> Recipe:
        """Steps that depend on more than weights, over the same workspaces."""
        steps = tuple(step for step in self.steps if not step.weights_only)
        return Recipe(
            steps, self.workspaces, self.filled | {one.name for one in self.lasting if not one.zeroed}
        )

    @cached_property
    def lasting(self) -> tuple[Workspace, ...]:
        """Workspaces that persist from call to call: packed weights and counters."""
        packed = frozenset[str]().union(*(step.buffers for step in self.packing.steps))
        return tuple(one for one in self.workspaces if one.zeroed or one.name in packed)

    @property
    def launches_early_after_packing(self) -> bool:
        """`launches_early` of the steps after packing."""
        return self.after_packing.launches_early

    @property
    def launches_early(self) -> bool:
        """True if the CTAs of the first launch occupy an SM each, or are few: it may overlap the previous launch."""
        first = next((step for step in self.steps if isinstance(step, KernelCall)), None)
        if first is None:
            return False
        return first.shared_bytes > HALF_SM_SHARED_BYTES or math.prod(first.grid) <= HALF_SM_COUNT

    @property
    def workspace_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.workspaces)

    def remap(self, buffers: Mapping[str, Buffer], lane: int = 0) -> Recipe:
        """Return this recipe in another lane, with buffers and workspaces replaced by name."""

        def moved(buffer: Buffer) -> Buffer:
            target = buffers.get(buffer.name)
            if target is None:
                return buffer
            return replace(buffer, name=target.name, offset=target.offset + buffer.offset)

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
