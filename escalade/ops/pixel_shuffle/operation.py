"""The operation pixel_shuffle, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.pixel_shuffle import reference
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.pixel_shuffle.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.pixel_shuffle.rungs.naive import NAIVE
from escalade.ops.pixel_shuffle.rungs.runs import RUNS
from escalade.ops.pixel_shuffle.rungs.vectorised import VECTORISED
from escalade.ops.shared.images import LAYOUTS


class PixelShuffle(Operation[PixelShuffleProblem]):
    name = "pixel_shuffle"
    problem = PixelShuffleProblem
    in_pytorch = reference
    ladder = Ladder("pixel_shuffle", (NAIVE, RUNS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: PixelShuffleProblem) -> tuple[str, ...]:
        return ("vectorised", "runs", "naive")


PIXEL_SHUFFLE = PixelShuffle()
