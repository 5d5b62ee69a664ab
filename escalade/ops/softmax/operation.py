"""The ladder of softmax, foot to summit."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.rows import LAYOUTS
from escalade.ops.softmax import reference
from escalade.ops.softmax.problem import SoftmaxProblem
from escalade.ops.softmax.rungs import RUNGS

PROBLEMS = tuple(SoftmaxProblem(batch, 1000) for batch in (1, 32, 256, 10_000))

SMALL_PROBLEMS = (
    SoftmaxProblem(5, 1000),
    SoftmaxProblem(3, 33),
    SoftmaxProblem(1, 2310),
    SoftmaxProblem(2, 33_002),
    SoftmaxProblem(600, 24),
    SoftmaxProblem(4, 1),
)
"""Small problems that between them have rows of one warp, of several, and too wide for registers; widths that no vector
divides."""


class Softmax(Operation[SoftmaxProblem]):
    name = "softmax"
    problem = SoftmaxProblem
    in_pytorch = reference
    ladder = Ladder("softmax", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: SoftmaxProblem) -> tuple[str, ...]:
        return ("block_per_row",)


SOFTMAX = Softmax()
