"""The operation max_pool2d_backward, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.max_pool2d_backward import reference
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.max_pool2d_backward.rungs.atomics import ATOMICS
from escalade.ops.max_pool2d_backward.rungs.gathered import GATHERED
from escalade.ops.max_pool2d_backward.rungs.rows import ROWS
from escalade.ops.max_pool2d_backward.rungs.shared_sums import SHARED_SUMS
from escalade.ops.max_pool2d_backward.rungs.stored import STORED
from escalade.ops.max_pool2d_backward.rungs.vectorised import VECTORISED
from escalade.ops.shared.images import LAYOUTS


class MaxPool2dBackward(Operation[MaxPool2dBackwardProblem]):
    name = "max_pool2d_backward"
    problem = MaxPool2dBackwardProblem
    in_pytorch = reference
    ladder = Ladder("max_pool2d_backward", (ATOMICS, SHARED_SUMS, GATHERED, STORED, ROWS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: MaxPool2dBackwardProblem) -> tuple[str, ...]:
        """Never `atomics` and `shared_sums`: their results are not the same bits every time."""
        return ("vectorised", "rows", "stored", "gathered")


MAX_POOL2D_BACKWARD = MaxPool2dBackward()
