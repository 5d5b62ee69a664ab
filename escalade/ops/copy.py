"""Elements moved from some strided places to others in one pass."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from escalade.device.program import Constant, Program, Type
from escalade.device.recipe import Addresses, Argument, Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared.pointwise import PacksConfig, dense_strides, reciprocal

# --- the problem


MOVED = (*DTYPES, "uint8")
"""What may be moved; other types are moved as one of these with as many bytes."""
LAYOUTS = ("flat",)
MOST_DIMENSIONS = 8
MOST_PARTS = 64
_FORM = (
    "copy; the form is 1024[x0+0:32x32@1,32>0@32,1]: the elements of y, and for each part the buffer with its first "
    "element, sizes and strides, > and y's first element and strides, a semicolon between two; _aligned2 where buffers "
    "begin at multiples of 2 elements alone"
)
_PART = re.compile(
    r"x(?P<source>\d+)\+(?P<x_first>\d+):(?P<sizes>\d+(x\d+)*)@(?P<x_strides>-?\d+(,-?\d+)*)"
    r">(?P<y_first>\d+)@(?P<y_strides>\d+(,\d+)*)"
)


@dataclass(frozen=True)
class Part:
    """y[y_first + Σ i * y_stride] = x[x_first + Σ i * x_stride] for each index i along every dimension.

    A stride of x may be 0, where it is repeated, or less, where it is turned around. y's are above 0, none less than
    the next.
    """

    source: int
    """The number of the buffer that is read: x0, x1, …"""
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
        """One more than the last element of x that is read."""
        ahead = (size - 1 for size in self.sizes)
        return self.x_first + sum(max(0, s) * n for s, n in zip(self.x_strides, ahead, strict=True)) + 1

    @property
    def x_begin(self) -> int:
        """The first element of x that is read."""
        ahead = (size - 1 for size in self.sizes)
        return self.x_first + sum(min(0, s) * n for s, n in zip(self.x_strides, ahead, strict=True))

    @property
    def y_end(self) -> int:
        ahead = (size - 1 for size in self.sizes)
        return self.y_first + sum(s * n for s, n in zip(self.y_strides, ahead, strict=True)) + 1

    def collapsed(self) -> Part:
        """The part with as few dimensions as say it all, in the order in which they lie in y."""
        axes = zip(self.sizes, self.x_strides, self.y_strides, strict=True)
        kept: list[tuple[int, int, int]] = []
        for size, x, y in sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[2]):
            if kept and kept[-1][1:] == (x * size, y * size):
                kept[-1] = (kept[-1][0] * size, x, y)
            else:
                kept.append((size, x, y))
        sizes, x_strides, y_strides = zip(*(kept or [(1, 1, 1)]), strict=True)
        return replace(self, sizes=sizes, x_strides=x_strides, y_strides=y_strides)


def _read_parts(text: str) -> tuple[Part, ...]:
    parts = []
    for one in (match_name(_PART, part, _FORM) for part in text.split(";")):
        sizes = tuple(map(int, one["sizes"].split("x")))
        x_strides, y_strides = (tuple(map(int, one[f"{side}_strides"].split(","))) for side in "xy")
        parts.append(
            Part(int(one["source"]), sizes, x_strides, y_strides, int(one["x_first"]), int(one["y_first"]))
        )
    return tuple(parts)


def _spell_parts(parts: tuple[Part, ...]) -> str:
    return ";".join(
        f"x{one.source}+{one.x_first}:{'x'.join(map(str, one.sizes))}@{','.join(map(str, one.x_strides))}"
        f">{one.y_first}@{','.join(map(str, one.y_strides))}"
        for one in parts
    )


@dataclass(frozen=True)
class CopyProblem(Named):
    """Every part is written to its place in y; what no part covers stays as it is. Parts do not overlap.

    Make one by `of`, which puts dimensions together.
    """

    NAME: ClassVar = NamePattern(
        "copy", r"{elements}\[{parts}\][_aligned{aligned}]", parts=Codec(r"[^\]]*", _read_parts, _spell_parts)
    )

    elements: int
    """The elements that y has room for."""
    parts: tuple[Part, ...]
    dtype: str = "fp32"
    aligned: int = 0
    """The number of elements to a multiple of which every buffer begins; 0: to 16 bytes."""
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        require("copy", "dtype", self.dtype, MOVED)
        require("copy", "layout", self.layout, LAYOUTS)
        require_at_least(0, {"elements": self.elements, "aligned": self.aligned})
        if self.batch != 1:
            raise UnsupportedError(
                f"a batch of {self.batch}: copy moves elements, whatever images they belong to"
            )
        if not 1 <= len(self.parts) <= MOST_PARTS:
            raise UnsupportedError(f"{len(self.parts)} parts: copy moves 1 to {MOST_PARTS} of them at once")
        for part in self.parts:
            _check(part, self.elements)

    @staticmethod
    def of(elements: int, parts: Iterable[Part], dtype: str = "fp32", aligned: int = 0) -> CopyProblem:
        """The problem of parts with dimensions in any order; those that are empty count for nothing."""
        found = tuple(part.collapsed() for part in parts if part.elements)
        return CopyProblem(elements, found, dtype, aligned)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the buffers that are read."""
        return tuple(f"x{number}" for number in sorted({part.source for part in self.parts}))

    def source_elements(self, source: str) -> int:
        """The fewest elements that a buffer has for all that is read of it."""
        return max(part.x_end for part in self.parts if f"x{part.source}" == source)

    @property
    def moved(self) -> int:
        """Elements that are written."""
        return sum(part.elements for part in self.parts)

    @property
    def flops(self) -> int:
        """Nothing is computed: an element is moved."""
        return self.moved

    @property
    def bytes(self) -> int:
        read = 0
        for part in self.parts:
            read += math.prod(n for n, s in zip(part.sizes, part.x_strides, strict=True) if s)
        return (read + self.moved) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: every element is one of the inputs."""
        return 0.0


def _check(part: Part, elements: int) -> None:
    """Refuses what lies outside of its buffers, or on itself."""
    ranks = {len(part.sizes), len(part.x_strides), len(part.y_strides)}
    if len(ranks) != 1 or not 1 <= len(part.sizes) <= MOST_DIMENSIONS or min(part.sizes) < 1:
        raise UnsupportedError(
            f"a part of sizes {part.sizes} with strides {part.x_strides} and {part.y_strides}: copy takes 1 to "
            f"{MOST_DIMENSIONS} dimensions of at least one element, with two strides each"
        )
    if part.source < 0 or part.x_begin < 0 or part.y_first < 0 or part.y_end > elements:
        raise UnsupportedError(
            f"a part from {part.x_begin} of x{part.source} on to {part.y_first} up to {part.y_end} of y, which has "
            f"{elements} elements: parts lie inside their buffers"
        )
    inner = zip(part.sizes[1:], part.y_strides[1:], strict=True)
    if part.y_strides[-1] < 1 or any(
        outer < size * stride for outer, (size, stride) in zip(part.y_strides, inner, strict=False)
    ):
        raise UnsupportedError(
            f"strides of {part.y_strides} along {part.sizes} in y: dimensions of a part are in the order in which they "
            "lie there, and none of its elements lies on another"
        )
    if any(abs(stride) >= 2**31 for stride in (*part.x_strides, *part.y_strides)):
        raise UnsupportedError("strides of 2^31 elements or more: kernels have 32 bits for each")


# --- rungs, arguments: how copy reaches a kernel: the table of parts that its rungs share


_BY_BYTES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}
PARTS_A_LAUNCH = 8
"""Parts that a launch takes: their table is passed by value."""


@dataclass(frozen=True)
class Laid:
    """A part as a kernel walks it: sizes of what it counts, and elements from one to the next on both sides."""

    part: Part
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    blocks: int
    vector: int = 1
    """Elements that are moved at once."""


def moved_as(problem: CopyProblem) -> Type:
    """What an element is moved as: an integer of as many bytes."""
    return Type(_BY_BYTES[ELEMENT_BYTES[problem.dtype]])


def launches_of(problem: CopyProblem) -> list[tuple[Part, ...]]:
    """The parts of each launch."""
    return [
        problem.parts[first : first + PARTS_A_LAUNCH]
        for first in range(0, len(problem.parts), PARTS_A_LAUNCH)
    ]


def table(laid: Sequence[Laid], rank: int, element_bytes: int) -> tuple[Argument, ...]:
    """`Addresses` and `Parts` of kernels/copy/parts.cuh."""
    read = (Buffer(f"x{one.part.source}", one.part.x_first * element_bytes) for one in laid)
    written = (Buffer("y", one.part.y_first * element_bytes) for one in laid)
    rows: list[int] = []
    first_block = 0
    for one in laid:
        more = rank - len(one.sizes)
        sizes = (*(1,) * more, *one.sizes)
        magic, shift = zip(*map(reciprocal, sizes), strict=True)
        none = (0,) * more
        count = 1
        for size in sizes:
            count *= size
        rows += (
            first_block, count, one.vector, *sizes, *magic, *shift, *none, *one.x_strides, *none, *one.y_strides,
        )  # fmt: skip
        first_block += one.blocks
    return Addresses((*read, *written)), Ints(tuple(rows))


# --- rungs, naive: one thread per element


class Naive(Rung[CopyProblem, ThreadsConfig]):
    last_resort: ClassVar[bool] = True

    def supports(self, problem: CopyProblem) -> str | None:
        most = max(max(part.sizes) for part in problem.parts)
        if most >= 2**32:
            return f"{self.name} counts up to 2^32 along a dimension; {most} elements are too many"
        return None

    def configs(self, problem: CopyProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512))

    def recipe(self, problem: CopyProblem, config: ThreadsConfig) -> Recipe:
        return Recipe(tuple(self._launch(problem, parts, config) for parts in launches_of(problem)))

    def _launch(self, problem: CopyProblem, parts: tuple[Part, ...], config: ThreadsConfig) -> KernelCall:
        laid = [
            Laid(part, part.sizes, part.x_strides, part.y_strides, blocks(part.elements, config.threads))
            for part in parts
        ]
        rank = max(len(part.sizes) for part in parts)
        constants: dict[str, Constant] = {"Element": moved_as(problem), "PARTS": len(parts), "RANK": rank}
        return KernelCall(
            Program.of("copy/naive.cu", "copy_naive", constants),
            (sum(one.blocks for one in laid), 1, 1),
            (config.threads, 1, 1),
            table(laid, rank, ELEMENT_BYTES[problem.dtype]),
            overlap=True,
        )


# Predictions for 32 matrices of 196 x 512 turned, fp16: 12.8 MB, 3 us and a launch.
NAIVE = Naive("naive", "one thread an element, in the order of the result, its place by division", None, None)


# --- rungs, tiled: tiles of two dimensions are turned in shared memory


TILE = 64
_THREADS = 256
_LEAST = TILE * TILE // 4
"""Elements of a tile that are worth a block: smaller matrices are read whole by a warp or two, out of L1."""


@dataclass(frozen=True)
class _Turned:
    """A part as matrices to transpose: the axis of the sizes along which x's neighbours lie; y's lie along the last."""

    part: Part
    axis: int

    @property
    def rows(self) -> int:
        return self.part.sizes[-1]

    @property
    def columns(self) -> int:
        return self.part.sizes[self.axis]

    @property
    def around(self) -> list[int]:
        """The axes that say which matrix it is."""
        return [axis for axis in range(len(self.part.sizes) - 1) if axis != self.axis]

    def laid(self) -> Laid:
        """In tiles, those of rows innermost, and those of columns next."""
        part, around = self.part, self.around
        sizes = (
            *(part.sizes[axis] for axis in around),
            ceil_div(self.columns, TILE),
            ceil_div(self.rows, TILE),
        )
        x = (*(part.x_strides[axis] for axis in around), TILE, TILE * part.x_strides[-1])
        y = (*(part.y_strides[axis] for axis in around), TILE * part.y_strides[self.axis], TILE)
        tiles = 1
        for size in sizes:
            tiles *= size
        return Laid(part, sizes, x, y, tiles)

    @property
    def x_steps(self) -> tuple[int, ...]:
        """What divides every place at which a run of x begins, and its length."""
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
            turned = _turned(part)
            if turned is None:
                return (
                    f"{self.name} turns matrices whose neighbours lie along one dimension in x and along another in y; "
                    f"{part.sizes} with strides {part.x_strides} and {part.y_strides} has none"
                )
            tiles = ceil_div(turned.rows, TILE) * ceil_div(turned.columns, TILE)
            if min(turned.rows, turned.columns) < least or turned.rows * turned.columns < tiles * _LEAST:
                return (
                    f"{self.name} takes matrices that fill a quarter of their tiles of {TILE} by {TILE}, and have 16 "
                    f"bytes of each row and column; these are {turned.rows} by {turned.columns}"
                )
            if (
                turned.laid().blocks * len(problem.parts) >= 2**31
                or max(turned.rows, turned.columns) >= 2**31
            ):
                return f"{self.name} counts tiles in 32 bits; there are too many in {part.elements} elements"
        return None

    def configs(self, problem: CopyProblem) -> tuple[Config, ...]:
        return (Config(),)

    def recipe(self, problem: CopyProblem, config: Config) -> Recipe:
        return Recipe(tuple(_launch(problem, parts) for parts in launches_of(problem)))


def _turned(part: Part) -> _Turned | None:
    """The part as matrices, if x's neighbours lie along another dimension than y's."""
    if part.y_strides[-1] != 1 or part.x_strides[-1] == 1:
        return None
    return next((_Turned(part, axis) for axis, step in enumerate(part.x_strides) if step == 1), None)


def _launch(problem: CopyProblem, parts: tuple[Part, ...]) -> KernelCall:
    turned = [found for found in map(_turned, parts) if found is not None]
    laid = [one.laid() for one in turned]
    rank = max(len(one.sizes) for one in laid)
    x_steps = (step for one in turned for step in one.x_steps)
    y_steps = (step for one in turned for step in one.y_steps)
    constants: dict[str, Constant] = {
        "Element": moved_as(problem),
        "PARTS": len(parts),
        "RANK": rank,
        "X_VECTOR": min(TILE // 8, widest_vector(problem.dtype, problem.aligned, *x_steps)),
        "Y_VECTOR": widest_vector(problem.dtype, problem.aligned, *y_steps),
    }
    edges = ((one.rows, one.columns, one.part.x_strides[-1], one.part.y_strides[one.axis]) for one in turned)
    return KernelCall(
        Program.of("copy/tiled.cu", "copy_tiled", constants),
        (sum(one.blocks for one in laid), 1, 1),
        (_THREADS, 1, 1),
        (
            *table(laid, rank, ELEMENT_BYTES[problem.dtype]),
            Ints(tuple(number for edge in edges for number in edge)),
        ),
        overlap=True,
    )


# Predictions for 32 matrices of 196 x 512 turned, fp16: 12.8 MB, 3 us and a launch.
TILED = Tiled(
    "tiled",
    "matrices that lie along different dimensions on both sides are turned in shared memory, whole sectors each way",
    below="vectorised",
    # One sector for each of 3.2 million elements, 103 MB out of L2 at 5.5 TB/s (19 us) and as many single accesses,
    # against 12.8 MB at 4.1 TB/s and a launch (5.6 us).
    predicted_gain=3.5,
)


# --- rungs, vectorised: runs that both sides have, 16 bytes at once, several under way in a thread


class Vectorised(Rung[CopyProblem, PacksConfig]):
    def supports(self, problem: CopyProblem) -> str | None:
        most = max(part.elements for part in problem.parts)
        if most >= 2**31:
            return f"{self.name} finds places of up to 2^31 elements of a part; {most} are too many"
        return None

    def configs(self, problem: CopyProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(256, packs) for packs in (4, 2, 1, 8)]
        packs = sum(part.elements // _vector(problem, part) for part in problem.parts)
        filling = [one for one in every if packs >= self.card.busy_blocks * one.threads * one.packs]
        default = filling[0] if filling else PacksConfig(256, 1)
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: CopyProblem, config: PacksConfig) -> Recipe:
        return Recipe(tuple(_launch_vectorised(problem, parts, config) for parts in launches_of(problem)))


def _launch_vectorised(problem: CopyProblem, parts: tuple[Part, ...], config: PacksConfig) -> KernelCall:
    laid = [_laid(part, _vector(problem, part), config) for part in parts]
    rank = max(len(one.sizes) for one in laid)
    constants: dict[str, Constant] = {
        "Element": moved_as(problem),
        "PARTS": len(parts),
        "RANK": rank,
        "VECTOR": max(one.vector for one in laid),
        "LEAST": min(one.vector for one in laid),
        "PACKS": config.packs,
        "THREADS": config.threads,
    }
    return KernelCall(
        Program.of("copy/vectorised.cu", "copy_vectorised", constants),
        (sum(one.blocks for one in laid), 1, 1),
        (config.threads, 1, 1),
        table(laid, rank, ELEMENT_BYTES[problem.dtype]),
        overlap=True,
    )


def _laid(part: Part, vector: int, config: PacksConfig) -> Laid:
    """The part in packs of so many neighbours."""
    return Laid(
        part,
        (*part.sizes[:-1], part.sizes[-1] // vector),
        (*part.x_strides[:-1], part.x_strides[-1] * vector),
        (*part.y_strides[:-1], part.y_strides[-1] * vector),
        blocks(part.elements // vector, config.threads * config.packs),
        vector,
    )


def _vector(problem: CopyProblem, part: Part) -> int:
    """Neighbours that may be one access on both sides."""
    if (part.x_strides[-1], part.y_strides[-1]) != (1, 1):
        return 1
    steps = (part.sizes[-1], part.x_first, part.y_first, *part.x_strides[:-1], *part.y_strides[:-1])
    return widest_vector(problem.dtype, problem.aligned, *steps)


# Predictions for an image of 56 x 56 with 96 channels cut into 64 windows, batch 8, fp16: 9.6 MB, 2.3 us and a launch.
VECTORISED = Vectorised(
    "vectorised",
    "runs that both sides have move up to 16 bytes an access, several under way in a thread, without divisions",
    below="naive",
    # 2.4 million threads with six 64-bit divisions, 350 instructions each (29 us), against 2.3 us and a launch.
    predicted_gain=6.0,
)


# --- problems to measure and to test


def permuted(sizes: tuple[int, ...], order: tuple[int, ...]) -> CopyProblem:
    """The problem of a dense tensor whose dimensions are put into another order."""
    strides = dense_strides(sizes)
    turned = tuple(sizes[axis] for axis in order)
    part = Part(0, turned, tuple(strides[axis] for axis in order), dense_strides(turned))
    return CopyProblem.of(part.elements, [part])


def joined(rows: int, widths: tuple[int, ...]) -> CopyProblem:
    """The problem of several matrices side by side."""
    whole = sum(widths)
    parts = [
        Part(number, (rows, width), (width, 1), (whole, 1), 0, sum(widths[:number]))
        for number, width in enumerate(widths)
    ]
    return CopyProblem.of(rows * whole, parts)


def rolled(sizes: tuple[int, int, int], down: int, along: int) -> CopyProblem:
    """The problem of an image in NHWC whose rows and columns go round by so many."""
    rows, columns, channels = sizes
    parts = []
    for first_row, last_row in ((0, rows - down), (rows - down, rows)):
        for first, last in ((0, columns - along), (columns - along, columns)):
            to = (first_row + down) % rows * columns + (first + along) % columns
            box = (last_row - first_row, last - first, channels)
            steps = (columns * channels, channels, 1)
            parts.append(Part(0, box, steps, steps, (first_row * columns + first) * channels, to * channels))
    return CopyProblem.of(rows * columns * channels, parts)


PROBLEMS = (
    permuted((32, 196, 512), (0, 2, 1)),
    permuted((8, 8, 7, 8, 7, 96), (0, 1, 3, 2, 4, 5)),
    rolled((56 * 8, 56, 96), 3, 3),
    joined(56 * 56 * 32, (13, 11)),
)
"""What `escalade ladder copy` measures: tokens as channels, an image cut into windows, one that goes round, and
channels of odd numbers side by side."""

SMALL_PROBLEMS = (
    permuted((2, 33, 72), (0, 2, 1)),
    permuted((2, 3, 16, 5, 24), (3, 0, 4, 1, 2)),
    permuted((3, 2, 4, 5, 16), (0, 2, 1, 3, 4)),
    permuted((5, 3, 7), (2, 1, 0)),
    rolled((6, 5, 8), 2, 3),
    rolled((3, 4, 3), 1, 1),
    joined(20, (1, 1)),
    joined(7, (3, 8, 13)),
    CopyProblem.of(2 * 40 * 40, [
        Part(0, (40, 40), (1, 40), (40, 1), 0, 0), Part(1, (40, 40), (2, 90), (40, 1), 6, 1600),
    ]),
    CopyProblem.of(2 * 48 * 64, [
        Part(0, (48, 64), (1, 48), (64, 1)), Part(1, (48, 64), (1, 56), (64, 1), 8, 3072),
    ]),
    CopyProblem.of(6 * 16, [Part(0, (6, 16), (-16, 1), (16, 1), 80)]),
    CopyProblem.of(5 * 12, [Part(0, (5, 12), (0, -1), (12, 1), 11)]),
    CopyProblem.of(24 * 48, [Part(0, (24, 48), (1, 24), (48, 1))], aligned=2),
    CopyProblem.of(24 * 40, [Part(0, (24, 40), (80, 1), (40, 1))], aligned=1),
)  # fmt: skip
"""Small problems that between them have dimensions in many orders, several parts and sources, edges of tiles, strides
of 0 and below, and buffers that begin at any element."""


# --- the reference


def random_inputs(problem: CopyProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    storage = STORAGE[problem.dtype]
    found = {}
    for name in problem.sources:
        size = (problem.source_elements(name),)
        if storage.is_floating_point:
            found[name] = torch.randn(size, generator=generator, device=device).to(storage)
        else:
            found[name] = torch.randint(0, 256, size, generator=generator, device=device).to(storage)
    return found


def empty_output(problem: CopyProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)


def exact(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64, zeros where nothing is written."""
    return _moved(problem, {name: x.double() for name, x in inputs.items()})


def peer(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A copy for each part."""
    return _moved(problem, inputs)


def _moved(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    given = next(iter(inputs.values()))
    # Parts that leave nothing out are all that PyTorch needs to do.
    make = torch.empty if problem.moved == problem.elements else torch.zeros
    y = make(problem.elements, dtype=given.dtype, device=given.device)
    for part in problem.parts:
        x = inputs[f"x{part.source}"].reshape(-1)
        backwards = [axis for axis, stride in enumerate(part.x_strides) if stride < 0]
        strides = tuple(map(abs, part.x_strides))  # PyTorch has none below 0
        seen = torch.as_strided(x, part.sizes, strides, x.storage_offset() + part.x_begin).flip(backwards)
        torch.as_strided(y, part.sizes, part.y_strides, part.y_first).copy_(seen)
    return y


# --- the operation


class Copy(Operation[CopyProblem]):
    name = "copy"
    problem = CopyProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("copy", (NAIVE, VECTORISED, TILED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: CopyProblem) -> tuple[str, ...]:
        return ("tiled", "vectorised", "naive")


COPY = Copy()
