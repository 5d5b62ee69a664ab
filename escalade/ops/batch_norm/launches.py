"""What the launches of normalisation and statistics share: how an array is laid over threads."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Type
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.batch_norm.problem import BatchNormProblem, BatchStatisticsProblem

AnyProblem = BatchNormProblem | BatchStatisticsProblem


def channels_innermost(problem: AnyProblem) -> bool:
    """Images of one pixel are laid out alike in both layouts."""
    return problem.layout == "nhwc" or problem.pixels == 1


def constants(problem: AnyProblem) -> dict[str, Constant]:
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
    def of(problem: AnyProblem, threads: int) -> Rows:
        vector = widest_vector(problem.dtype, problem.channels)
        packs = problem.channels // vector
        width = min(packs, threads)
        return Rows(vector, width, threads // width, blocks(packs, width))
