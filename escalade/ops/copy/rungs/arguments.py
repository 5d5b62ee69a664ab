"""How copy reaches a kernel: the table of parts that its rungs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from escalade.device.program import Type
from escalade.device.recipe import Addresses, Argument, Buffer, Ints
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.copy.problem import CopyProblem, Part
from escalade.ops.shared.pointwise import reciprocal

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
