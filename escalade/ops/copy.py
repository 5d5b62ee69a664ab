"""Strided copies in one pass."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch

from escalade.device.program import Program, Type
from escalade.device.recipe import Addresses, Argument, Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung, first_that
from escalade.ops.shared.pointwise import PacksConfig, dense_strides, reciprocal

# --- the problem


MOVED = (*DTYPES, "uint8")
"""Dtypes that may be moved; others are moved as one of the same size."""
LAYOUTS = ("flat",)
MOST_DIMENSIONS = 8
MOST_PARTS = 64
_FORM = (
    "copy; the form is 1024[x0+0:32x32@1,32>0@32,1]: the elements of y, and for each part the buffer with its first "
    "element, sizes and strides, > and y's first element and strides, with semicolons between parts; then _aligned2 if "
    "buffers are only aligned to 2 elements"
)
_PART = re.compile(
    r"x(?P<source>\d+)\+(?P<x_first>\d+):(?P<sizes>\d+(x\d+)*)@(?P<x_strides>-?\d+(,-?\d+)*)"
    r">(?P<y_first>\d+)@(?P<y_strides>\d+(,\d+)*)"
)


@dataclass(frozen=True)
class CopyPart:
    """y[y_first + Σ i * y_stride] = x[x_first + Σ i * x_stride] for each index i along every dimension.

    A stride of x may be 0 (broadcast) or negative (reversed). y's are positive and in descending order.
    """

    source: int
    """Number of the buffer that is read: x0, x1, …"""
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    x_first: int = 0
    y_first: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def x_end(self) -> int:
        """End of the elements of x that are read."""
        ahead = (size - 1 for size in self.sizes)
        return self.x_first + sum(max(0, s) * n for s, n in zip(self.x_strides, ahead, strict=True)) + 1

    @property
    def x_begin(self) -> int:
        """First element of x that is read."""
        ahead = (size - 1 for size in self.sizes)
        return self.x_first + sum(min(0, s) * n for s, n in zip(self.x_strides, ahead, strict=True))

    @property
    def y_end(self) -> int:
        ahead = (size - 1 for size in self.sizes)
        return self.y_first + sum(s * n for s, n in zip(self.y_strides, ahead, strict=True)) + 1

    def collapsed(self) -> CopyPart:
        """Merge dimensions where possible, in descending order of y's strides."""
        axes = zip(self.sizes, self.x_strides, self.y_strides, strict=True)
        kept: list[tuple[int, int, int]] = []
        for size, x, y in sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[2]):
            if kept and kept[-1][1:] == (x * size, y * size):
                kept[-1] = (kept[-1][0] * size, x, y)
            else:
                kept.append((size, x, y))
        sizes, x_strides, y_strides = zip(*(kept or [(1, 1, 1)]), strict=True)
        return replace(self, sizes=sizes, x_strides=x_strides, y_strides=y_strides)


def _read_parts(text: str) -> tuple[CopyPart, ...]:
    parts = []
    for one in (match_name(_PART, part, _FORM) for part in text.split(";")):
        sizes = tuple(map(int, one["sizes"].split("x")))
        x_strides, y_strides = (tuple(map(int, one[f"{side}_strides"].split(","))) for side in "xy")
        parts.append(
            CopyPart(
                int(one["source"]), sizes, x_strides, y_strides, int(one["x_first"]), int(one["y_first"])
            )
        )
    return tuple(parts)


def _spell_parts(parts: tuple[CopyPart, ...]) -> str:
    return ";".join(
        f"x{one.source}+{one.x_first}:{'x'.join(map(str, one.sizes))}@{','.join(map(str, one.x_strides))}"
        f">{one.y_first}@{','.join(map(str, one.y_strides))}"
        for one in parts
    )


@dataclass(frozen=True)
class CopyProblem(Named):
    """Write every part to its position in y; the rest of y is unchanged. Parts do not overlap.

    Build one with `of`, which merges dimensions.
    """

    NAME: ClassVar = NamePattern(
        "copy", r"{elements}\[{parts}\][_aligned{aligned}]", parts=Codec(r"[^\]]*", _read_parts, _spell_parts)
    )

    elements: int
    """Elements of y."""
    parts: tuple[CopyPart, ...]
    dtype: str = "fp32"
    aligned: int = 0
    """Alignment of every buffer, in elements; 0: 16 bytes."""
    layout: str = "flat"
    batch: int = 1
    """Always 1; records of all operations have a batch."""

    rounding = 0.0

    def __post_init__(self) -> None:
        require("copy", "dtype", self.dtype, MOVED)
        require("copy", "layout", self.layout, LAYOUTS)
        require_at_least(0, {"elements": self.elements, "aligned": self.aligned})
        if self.batch != 1:
            raise UnsupportedError(f"batch is {self.batch}: copy counts elements, and its batch must be 1")
        if not 1 <= len(self.parts) <= MOST_PARTS:
            raise UnsupportedError(f"{len(self.parts)} parts: copy supports 1 to {MOST_PARTS}")
        for part in self.parts:
            _check(part, self.elements)

    @staticmethod
    def of(elements: int, parts: Iterable[CopyPart], dtype: str = "fp32", aligned: int = 0) -> CopyProblem:
        """Return the problem of parts with dimensions in any order; empty parts are dropped."""
        found = tuple(part.collapsed() for part in parts if part.elements)
        return CopyProblem(elements, found, dtype, aligned)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the buffers that are read."""
        return tuple(f"x{number}" for number in sorted({part.source for part in self.parts}))

    def source_elements(self, source: str) -> int:
        """Return the fewest elements that a buffer needs."""
        return max(part.x_end for part in self.parts if f"x{part.source}" == source)

    @property
    def moved(self) -> int:
        """Elements written."""
        return sum(part.elements for part in self.parts)

    @property
    def flops(self) -> int:
        return self.moved

    @property
    def bytes(self) -> int:
        read = 0
        for part in self.parts:
            read += math.prod(n for n, s in zip(part.sizes, part.x_strides, strict=True) if s)
        return (read + self.moved) * ELEMENT_BYTES[self.dtype]


def _check(part: CopyPart, elements: int) -> None:
    """Raise if a part exceeds its buffers or overlaps itself."""
    ranks = {len(part.sizes), len(part.x_strides), len(part.y_strides)}
    if len(ranks) != 1 or not 1 <= len(part.sizes) <= MOST_DIMENSIONS or min(part.sizes) < 1:
        raise UnsupportedError(
            f"a part of sizes {part.sizes} with strides {part.x_strides} and {part.y_strides}: copy supports 1 to "
            f"{MOST_DIMENSIONS} dimensions of at least one element, with two strides each"
        )
    if part.source < 0 or part.x_begin < 0 or part.y_first < 0 or part.y_end > elements:
        raise UnsupportedError(
            f"a part from {part.x_begin} of x{part.source} to {part.y_first} up to {part.y_end} of y, which has "
            f"{elements} elements: parts must stay inside their buffers"
        )
    steps = list(zip(part.sizes, part.y_strides, strict=True))
    behind = list(accumulate(((size - 1) * stride for size, stride in reversed(steps)), initial=0))
    """Elements from the first to the last one within each dimension, from the innermost."""
    if any(stride <= extent for (_, stride), extent in zip(reversed(steps), behind, strict=False)):
        raise UnsupportedError(
            f"strides of {part.y_strides} along {part.sizes} in y: dimensions must be in descending order of "
            "strides, and elements must not overlap"
        )
    if any(abs(stride) >= 2**31 for stride in (*part.x_strides, *part.y_strides)):
        raise UnsupportedError("strides of 2^31 elements or more: kernels have 32 bits for each")


# --- rungs


_BY_BYTES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}
PARTS_PER_LAUNCH = 8
"""Parts per launch: their table is passed by value."""


@dataclass(frozen=True)
class WalkedPart:
    """A part as a kernel walks it: counts per dimension, and strides in elements on both sides."""

    part: CopyPart
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    blocks: int
    vector: int = 1
    """Elements per access."""


def _call(
    source: str, problem: CopyProblem, walked: Sequence[WalkedPart], config: Config, threads: int, *more: Argument,
    **scope: Any,
) -> KernelCall:  # fmt: skip
    """Return the launch of a kernel over a table of parts."""
    rank = max(len(one.sizes) for one in walked)
    integer = Type(_BY_BYTES[ELEMENT_BYTES[problem.dtype]])
    return kernel_call(
        Program.of(f"copy/{source}.cu", element=integer, parts=len(walked), rank=rank, config=config, **scope),
        sum(one.blocks for one in walked),
        threads,
        *_table(walked, rank, ELEMENT_BYTES[problem.dtype]), *more,
    )  # fmt: skip


def launches_of(problem: CopyProblem) -> list[tuple[CopyPart, ...]]:
    """Return the parts of each launch."""
    return [
        problem.parts[first : first + PARTS_PER_LAUNCH]
        for first in range(0, len(problem.parts), PARTS_PER_LAUNCH)
    ]


def _table(walked: Sequence[WalkedPart], rank: int, element_bytes: int) -> tuple[Argument, ...]:
    """Return `Addresses` and `Parts` of kernels/copy/parts.cuh."""
    read = (Buffer(f"x{one.part.source}", one.part.x_first * element_bytes) for one in walked)
    written = (Buffer("y", one.part.y_first * element_bytes) for one in walked)
    rows: list[int] = []
    first_block = 0
    for one in walked:
        more = rank - len(one.sizes)
        sizes = (*(1,) * more, *one.sizes)
        magic, shift = zip(*map(reciprocal, sizes), strict=True)
        none = (0,) * more
        rows += (
            first_block, math.prod(sizes), one.vector, *sizes, *magic, *shift, *none, *one.x_strides, *none,
            *one.y_strides,
        )  # fmt: skip
        first_block += one.blocks
    return Addresses((*read, *written)), Ints(tuple(rows))


class Naive(ThreadsRung[CopyProblem]):
    threads = (256, 512)
    last_resort: ClassVar[bool] = True

    def supports(self, problem: CopyProblem) -> str | None:
        most = max(max(part.sizes) for part in problem.parts)
        if most >= 2**32:
            return f"{self.name} counts up to 2^32 along a dimension; {most} elements exceed that"
        return None

    def recipe(self, problem: CopyProblem, config: ThreadsConfig) -> Recipe:
        return Recipe(tuple(self._launch(problem, parts, config) for parts in launches_of(problem)))

    def _launch(self, problem: CopyProblem, parts: tuple[CopyPart, ...], config: ThreadsConfig) -> KernelCall:
        walked = [
            WalkedPart(
                part, part.sizes, part.x_strides, part.y_strides, blocks(part.elements, config.threads)
            )
            for part in parts
        ]
        return _call("naive", problem, walked, config, config.threads)


NAIVE = Naive("naive", "one thread per element, in the order of the result, located by division", None, None)


# --- rung tiled: tiles of two dimensions are transposed in shared memory


TILE = 64
_THREADS = 256
_LEAST = TILE * TILE // 4
"""Elements of a tile that are worth a CTA: a warp or two read smaller matrices from L1."""


@dataclass(frozen=True)
class _Transposed:
    """A part as matrices to transpose: `axis` is contiguous in x; the last one is contiguous in y."""

    part: CopyPart
    axis: int

    @property
    def rows(self) -> int:
        return self.part.sizes[-1]

    @property
    def columns(self) -> int:
        return self.part.sizes[self.axis]

    @property
    def around(self) -> list[int]:
        """Axes that select the matrix."""
        return [axis for axis in range(len(self.part.sizes) - 1) if axis != self.axis]

    def walked(self) -> WalkedPart:
        """Return the part in tiles, those of rows innermost, then those of columns."""
        part, around = self.part, self.around
        sizes = (
            *(part.sizes[axis] for axis in around),
            ceil_div(self.columns, TILE),
            ceil_div(self.rows, TILE),
        )
        x = (*(part.x_strides[axis] for axis in around), TILE, TILE * part.x_strides[-1])
        y = (*(part.y_strides[axis] for axis in around), TILE * part.y_strides[self.axis], TILE)
        return WalkedPart(part, sizes, x, y, math.prod(sizes))

    @property
    def x_steps(self) -> tuple[int, ...]:
        """Numbers whose common divisors divide every start and length of a run of x."""
        part = self.part
        return (part.x_first, self.columns, part.x_strides[-1], *(part.x_strides[a] for a in self.around))

    @property
    def y_steps(self) -> tuple[int, ...]:
        part = self.part
        along = (part.y_strides[axis] for axis in range(len(part.sizes) - 1))
        return (part.y_first, self.rows, *along)


class Tiled(Rung[CopyProblem]):
    def supports(self, problem: CopyProblem) -> str | None:
        least = VECTOR_BYTES // ELEMENT_BYTES[problem.dtype]
        for part in problem.parts:
            turned = _transposed(part)
            if turned is None:
                return (
                    f"{self.name} transposes parts that are contiguous along one dimension in x and another in y; "
                    f"{part.sizes} with strides {part.x_strides} and {part.y_strides} is not"
                )
            tiles = ceil_div(turned.rows, TILE) * ceil_div(turned.columns, TILE)
            if min(turned.rows, turned.columns) < least or turned.rows * turned.columns < tiles * _LEAST:
                return (
                    f"{self.name} needs matrices that fill a quarter of their tiles of {TILE} by {TILE}, and have 16 "
                    f"bytes of each row and column; these are {turned.rows} by {turned.columns}"
                )
            tiles = turned.walked().blocks * len(problem.parts)
            if max(tiles, turned.rows, turned.columns) >= 2**31:
                return f"{self.name} counts tiles in 32 bits; {part.elements} elements need more"
        return None

    def configs(self, problem: CopyProblem) -> tuple[Config, ...]:
        return (Config(),)

    def recipe(self, problem: CopyProblem, config: Config) -> Recipe:
        return Recipe(tuple(_launch(problem, parts, config) for parts in launches_of(problem)))


def _transposed(part: CopyPart) -> _Transposed | None:
    """Return the part as matrices if x and y are contiguous along different dimensions."""
    if part.y_strides[-1] != 1 or part.x_strides[-1] == 1:
        return None
    return next((_Transposed(part, axis) for axis, step in enumerate(part.x_strides) if step == 1), None)


def _launch(problem: CopyProblem, parts: tuple[CopyPart, ...], config: Config) -> KernelCall:
    turned = [found for found in map(_transposed, parts) if found is not None]
    x_steps = (step for one in turned for step in one.x_steps)
    y_steps = (step for one in turned for step in one.y_steps)
    edges = ((one.rows, one.columns, one.part.x_strides[-1], one.part.y_strides[one.axis]) for one in turned)
    return _call(
        "tiled", problem, [one.walked() for one in turned], config, _THREADS,
        Ints(tuple(number for edge in edges for number in edge)),
        x_vector=min(TILE // 8, widest_vector(problem.dtype, problem.aligned, *x_steps)),
        y_vector=widest_vector(problem.dtype, problem.aligned, *y_steps),
    )  # fmt: skip


# Predicted for 32 matrices of 196 x 512, fp16: 12.8 MB, 3 us and a launch.
TILED = Tiled(
    "tiled",
    "matrices that are contiguous along different dimensions are transposed in shared memory, coalesced both ways",
    below="vectorised",
    # One sector for each of 3.2 million elements, 103 MB out of L2 at 5.5 TB/s (19 us) and as many single accesses,
    # against 12.8 MB at 4.1 TB/s and a launch (5.6 us).
    predicted_gain=3.5,
)


class Vectorized(Rung[CopyProblem, PacksConfig]):
    def supports(self, problem: CopyProblem) -> str | None:
        most = max(part.elements for part in problem.parts)
        if most >= 2**31:
            return f"{self.name} supports up to 2^31 elements per part; {most} exceed that"
        return None

    def configs(self, problem: CopyProblem) -> tuple[PacksConfig, ...]:
        """Default to the most packs per thread that leave enough CTAs."""
        every = [PacksConfig(256, packs) for packs in (4, 2, 1, 8)]
        packs = sum(part.elements // _vector(problem, part) for part in problem.parts)
        busy = self.card.busy_blocks
        return first_that(lambda one: packs >= busy * one.threads * one.packs, every, PacksConfig(256, 1))

    def recipe(self, problem: CopyProblem, config: PacksConfig) -> Recipe:
        return Recipe(tuple(_launch_vectorized(problem, parts, config) for parts in launches_of(problem)))


def _launch_vectorized(problem: CopyProblem, parts: tuple[CopyPart, ...], config: PacksConfig) -> KernelCall:
    walked = [_walked(part, _vector(problem, part), config) for part in parts]
    vectors = [one.vector for one in walked]
    return _call(
        "vectorised", problem, walked, config, config.threads, vector=max(vectors), least=min(vectors)
    )


def _walked(part: CopyPart, vector: int, config: PacksConfig) -> WalkedPart:
    """Return the part in packs of `vector` elements."""
    return WalkedPart(
        part,
        (*part.sizes[:-1], part.sizes[-1] // vector),
        (*part.x_strides[:-1], part.x_strides[-1] * vector),
        (*part.y_strides[:-1], part.y_strides[-1] * vector),
        blocks(part.elements // vector, config.threads * config.packs),
        vector,
    )


def _vector(problem: CopyProblem, part: CopyPart) -> int:
    """Return the elements per access that both sides allow."""
    if (part.x_strides[-1], part.y_strides[-1]) != (1, 1):
        return 1
    steps = (part.sizes[-1], part.x_first, part.y_first, *part.x_strides[:-1], *part.y_strides[:-1])
    return widest_vector(problem.dtype, problem.aligned, *steps)


# Predicted for an image of 56 x 56 with 96 channels cut into 64 windows, batch 8, fp16: 9.6 MB, 2.3 us and a launch.
VECTORISED = Vectorized(
    "vectorised",
    "runs that are contiguous on both sides move up to 16 bytes per access, several in flight, without divisions",
    below="naive",
    # 2.4 million threads with six 64-bit divisions, 350 instructions each (29 us), against 2.3 us and a launch.
    predicted_gain=6.0,
)


# --- problems


def permuted(sizes: tuple[int, ...], order: tuple[int, ...]) -> CopyProblem:
    """Return the problem that permutes the dimensions of a dense tensor."""
    strides = dense_strides(sizes)
    turned = tuple(sizes[axis] for axis in order)
    part = CopyPart(0, turned, tuple(strides[axis] for axis in order), dense_strides(turned))
    return CopyProblem.of(part.elements, [part])


def joined(rows: int, widths: tuple[int, ...]) -> CopyProblem:
    """Return the problem that concatenates matrices horizontally."""
    whole = sum(widths)
    parts = [
        CopyPart(number, (rows, width), (width, 1), (whole, 1), 0, sum(widths[:number]))
        for number, width in enumerate(widths)
    ]
    return CopyProblem.of(rows * whole, parts)


def rolled(sizes: tuple[int, int, int], down: int, along: int) -> CopyProblem:
    """Return the problem that rolls rows and columns of an NHWC image."""
    rows, columns, channels = sizes
    parts = []
    for first_row, last_row in ((0, rows - down), (rows - down, rows)):
        for first, last in ((0, columns - along), (columns - along, columns)):
            to = (first_row + down) % rows * columns + (first + along) % columns
            box = (last_row - first_row, last - first, channels)
            steps = (columns * channels, channels, 1)
            at = (first_row * columns + first) * channels
            parts.append(CopyPart(0, box, steps, steps, at, to * channels))
    return CopyProblem.of(rows * columns * channels, parts)


# --- the reference


def random_inputs(problem: CopyProblem, draw: Draw) -> dict[str, torch.Tensor]:
    storage = STORAGE[problem.dtype]
    found = {}
    for name in problem.sources:
        size = (problem.source_elements(name),)
        if storage.is_floating_point:
            found[name] = draw.normal(*size).to(storage)
        else:
            found[name] = draw.integers(256, *size).to(storage)
    return found


def empty_output(problem: CopyProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)


def exact(problem: CopyProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64, with zeros where nothing is written."""
    return _moved(problem, {name: x.double() for name, x in inputs.items()})


def peer(problem: CopyProblem, inputs: Tensors) -> torch.Tensor:
    """One copy per part."""
    return _moved(problem, inputs)


def _moved(problem: CopyProblem, inputs: Tensors) -> torch.Tensor:
    given = next(iter(inputs.values()))
    # If parts cover all of y, PyTorch need not zero it.
    make = torch.empty if problem.moved == problem.elements else torch.zeros
    y = make(problem.elements, dtype=given.dtype, device=given.device)
    for part in problem.parts:
        x = inputs[f"x{part.source}"].reshape(-1)
        backwards = [axis for axis, stride in enumerate(part.x_strides) if stride < 0]
        strides = tuple(map(abs, part.x_strides))  # PyTorch has no negative strides
        seen = torch.as_strided(x, part.sizes, strides, x.storage_offset() + part.x_begin).flip(backwards)
        torch.as_strided(y, part.sizes, part.y_strides, part.y_first).copy_(seen)
    return y


# --- the operation


class CopyOperation(Operation[CopyProblem]):
    name = "copy"
    problem = CopyProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("copy", (NAIVE, VECTORISED, TILED))
    problems = (
        permuted((32, 196, 512), (0, 2, 1)),
        permuted((8, 8, 7, 8, 7, 96), (0, 1, 3, 2, 4, 5)),
        rolled((56 * 8, 56, 96), 3, 3),
        joined(56 * 56 * 32, (13, 11)),
    )
    """Problems of `escalade ladder`: tokens as channels, an image cut into windows, a rolled one, and odd numbers of
    channels concatenated."""
    small_problems = (
        permuted((2, 33, 72), (0, 2, 1)),
        permuted((2, 3, 16, 5, 24), (3, 0, 4, 1, 2)),
        permuted((3, 2, 4, 5, 16), (0, 2, 1, 3, 4)),
        permuted((5, 3, 7), (2, 1, 0)),
        rolled((6, 5, 8), 2, 3),
        rolled((3, 4, 3), 1, 1),
        joined(20, (1, 1)),
        joined(7, (3, 8, 13)),
        CopyProblem.of(2 * 40 * 40, [
            CopyPart(0, (40, 40), (1, 40), (40, 1), 0, 0), CopyPart(1, (40, 40), (2, 90), (40, 1), 6, 1600),
        ]),
        CopyProblem.of(2 * 48 * 64, [
            CopyPart(0, (48, 64), (1, 48), (64, 1)), CopyPart(1, (48, 64), (1, 56), (64, 1), 8, 3072),
        ]),
        CopyProblem.of(6 * 16, [CopyPart(0, (6, 16), (-16, 1), (16, 1), 80)]),
        CopyProblem.of(5 * 12, [CopyPart(0, (5, 12), (0, -1), (12, 1), 11)]),
        CopyProblem.of(24 * 48, [CopyPart(0, (24, 48), (1, 24), (48, 1))], aligned=2),
        CopyProblem.of(24 * 40, [CopyPart(0, (24, 40), (80, 1), (40, 1))], aligned=1),
    )  # fmt: skip
    """Small problems: dimensions in many orders, several parts and sources, partial tiles, strides of 0 and below, and
    buffers of any alignment."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("tiled", "vectorised", "naive")


COPY = CopyOperation()
