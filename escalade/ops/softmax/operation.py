"""The operation softmax, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.rows import LAYOUTS
from escalade.ops.softmax import reference
from escalade.ops.softmax.problem import SoftmaxProblem
from escalade.ops.softmax.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.softmax.rungs.block_per_row import BLOCK_PER_ROW
from escalade.ops.softmax.rungs.columns import COLUMNS
from escalade.ops.softmax.rungs.part_of_warp import PART_OF_WARP
from escalade.ops.softmax.rungs.per_row import NAIVE, WARP_PER_ROW


class Softmax(Operation[SoftmaxProblem]):
    name = "softmax"
    problem = SoftmaxProblem
    in_pytorch = reference
    ladder = Ladder("softmax", (NAIVE, WARP_PER_ROW, BLOCK_PER_ROW, PART_OF_WARP, COLUMNS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: SoftmaxProblem) -> tuple[str, ...]:
        return ("columns", "part_of_warp", "block_per_row")


SOFTMAX = Softmax()
