"""Split-K over pixels: CTAs write partial sums to a workspace, and a second launch adds them up in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

PARTS = "parts"
EXPONENTS = "exponents"
_MANY = 2**31
_SUM_THREADS = 256
_SUM_LANES = ((8, 1), (32, 4), (128, 8), (_MANY, 32))
"""Threads per element, by the largest number of parts: each has a few loads."""
_REDUCTION_RATE = 20.0
"""Bytes of partial sums written or read per cycle and SM, about 5 TB/s on an H200."""
_START_CYCLES = 4000.0
"""Cycles to fill a CTA's pipeline and to store its sums."""
_MOST_PARTS = 4096
_WAVES = (0.25, 0.5, 0.75, 1, 2, 3, 4, 5, 6, 7, 8)
"""Numbers of waves to consider; less than one where the reduction dominates."""


def targets(direct: bool) -> tuple[Buffer, Buffer]:
    """Return where a kernel with `Sums` stores: in the results if `direct`, else in the workspace."""
    return Buffer("y" if direct else PARTS), Buffer("bias_gradient", optional=True)


def recipe(
    problem: Conv2dWeightGradientProblem, product: KernelCall, parts: int, direct: bool = False
) -> Recipe:
    """Return the recipe of a launch that writes `parts` partial sums, and of their reduction; `direct`: the results."""
    if direct:
        return Recipe((product,))
    return Recipe((product, total(problem, parts)), (workspace(problem, parts),))


def workspace(problem: Conv2dWeightGradientProblem, parts: int) -> Workspace:
    return Workspace(PARTS, 4 * parts * problem.part_elements)


def total(
    problem: Conv2dWeightGradientProblem, parts: int, bias_parts: int | None = None, scaled: bool = False
) -> KernelCall:
    """Return the launch that adds up `parts` partial sums, of the bias gradient the first `bias_parts`. If x and the
    gradient were scaled by a power of two per channel, the buffer `exponents` has it."""
    elements, weights = problem.part_elements, problem.forward.weight_elements
    vector = 4 if elements % 4 == 0 and weights % 4 == 0 else 1
    lanes = next(lanes for most, lanes in _SUM_LANES if parts <= most)
    arguments: tuple[Argument, ...] = (
        Buffer(PARTS), Buffer("y"), Buffer("bias_gradient", optional=True),
        Buffer(EXPONENTS, optional=True), parts, parts if bias_parts is None else bias_parts,
        Int64(weights), Int64(elements), problem.forward.channels, weights // problem.forward.filters,
    )  # fmt: skip
    return KernelCall(
        Program.of(
            "conv2d_weight_gradient/sum_parts.cu",
            problem=problem,
            threads=_SUM_THREADS,
            lanes=lanes,
            vector=vector,
            scaled=scaled,
        ),
        (blocks(elements, _SUM_THREADS // lanes * vector), 1, 1),
        (_SUM_THREADS, 1, 1),
        arguments,
        overlap=True,
    )


def reduction_cycles(parts: int, elements: int, card: Card) -> float:
    """Estimate the cycles to write and read partial sums of `elements` elements."""
    return 8 * parts * elements / (_REDUCTION_RATE * card.multiprocessors)


@dataclass(frozen=True)
class SplitWork:
    """Work to split: each tile has `pieces` pieces of `cycles` cycles."""

    tiles: int
    pieces: int
    cycles: float
    slots: int
    """CTAs per wave."""
    elements: int
    """Elements per partial sum, over all tiles."""
    card: Card
    direct: bool = False
    """True if a kernel stores the results itself when there is one part."""

    def cost(self, each: int) -> float:
        """Return the cycles with `each` pieces per part: waves of CTAs, and the reduction."""
        parts = ceil_div(self.pieces, each)
        waves = ceil_div(self.tiles * parts, self.slots)
        reduced = 0 if parts == 1 and self.direct else reduction_cycles(parts, self.elements, self.card)
        return waves * (each * self.cycles + _START_CYCLES) + reduced

    def best(self, most: int = _MANY) -> int:
        """Return the best number of pieces per part, up to `most`."""
        least = ceil_div(self.pieces, most)
        wanted = {
            max(least, min(self.pieces, _MOST_PARTS, int(waves * self.slots) // self.tiles))
            for waves in _WAVES
        }
        return min((ceil_div(self.pieces, parts) for parts in wanted), key=self.cost)

    def microseconds(self, problem: Conv2dWeightGradientProblem, each: int) -> float:
        launches = 1 if each >= self.pieces and self.direct else 2
        return self.card.microseconds(self.cost(each), problem.traffic, launches)
