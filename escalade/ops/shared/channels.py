"""What operations that treat images channel by channel share: names, checks, and how an array lies over threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from escalade.device.program import Constant, Type
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.shared.images import ImageProblem, check_problem, pair_pattern, require_32_bits, spell_pair

SIZES = rf"(?P<channels>\d+)_{pair_pattern('size')}_b(?P<batch>\d+)"
"""Matches what `spell_sizes` writes."""


class Channelwise(ImageProblem, Protocol):
    """Images whose channels are treated one by one."""

    @property
    def pixels(self) -> int: ...
    @property
    def elements(self) -> int: ...


def spell_sizes(problem: Channelwise) -> str:
    """`64_56_b32`: channels, image size, batch."""
    return f"{problem.channels}_{spell_pair((problem.height, problem.width))}_b{problem.batch}"


def check_channelwise(operation: str, problem: Channelwise) -> None:
    """Refuses what no such problem may be."""
    check_problem(operation, problem)
    require_32_bits(operation, problem.channels * problem.pixels)


def channels_innermost(problem: Channelwise) -> bool:
    """Images of one pixel are laid out alike in both layouts."""
    return problem.layout == "nhwc" or problem.pixels == 1


def constants(problem: Channelwise) -> dict[str, Constant]:
    """`Index` counts elements; 64-bit divisions take several times as long as 32-bit ones."""
    return {
        "Element": element(problem.dtype),
        "Index": Type("unsigned" if problem.elements < 2**31 else "unsigned long long"),
        "NHWC": channels_innermost(problem),
    }


@dataclass(frozen=True)
class Rows:
    """Rows of channels under a block: `width` packs of `vector` channels next to each other, `height` rows."""

    vector: int
    width: int
    height: int
    across: int
    """Blocks that it takes for all channels."""

    @staticmethod
    def of(problem: Channelwise, threads: int) -> Rows:
        vector = widest_vector(problem.dtype, problem.channels)
        packs = problem.channels // vector
        width = min(packs, threads)
        return Rows(vector, width, threads // width, blocks(packs, width))
