"""The operation avg_pool2d_backward, with its ladder."""

from __future__ import annotations

from escalade.ops.avg_pool2d_backward import reference
from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem
from escalade.ops.avg_pool2d_backward.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.avg_pool2d_backward.rungs.naive import NAIVE
from escalade.ops.avg_pool2d_backward.rungs.rows import ROWS
from escalade.ops.avg_pool2d_backward.rungs.vectorised import VECTORISED
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.images import LAYOUTS


class AvgPool2dBackward(Operation[AvgPool2dBackwardProblem]):
    name = "avg_pool2d_backward"
    problem = AvgPool2dBackwardProblem
    in_pytorch = reference
    ladder = Ladder("avg_pool2d_backward", (NAIVE, ROWS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: AvgPool2dBackwardProblem) -> tuple[str, ...]:
        return ("vectorised", "rows", "naive")


AVG_POOL2D_BACKWARD = AvgPool2dBackward()
