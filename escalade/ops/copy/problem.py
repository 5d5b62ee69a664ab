"""A movement of elements as a problem: boxes of them, each with strides on both sides."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Codec, Named, NamePattern

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
