"""The ladder of top_k, foot to summit."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.rows import LAYOUTS
from escalade.ops.top_k import reference
from escalade.ops.top_k.problem import TopKProblem
from escalade.ops.top_k.rungs import RUNGS

PROBLEMS = tuple(TopKProblem(batch, 1000, 5) for batch in (1, 32, 256, 10_000))

SMALL_PROBLEMS = (
    TopKProblem(5, 1000, 5),
    TopKProblem(3, 33, 4),
    TopKProblem(2, 2310, 32),
    TopKProblem(600, 24, 1),
    TopKProblem(3, 7, 7),
    TopKProblem(1, 1, 1),
)
"""Small problems that between them have one warp a row and several, all classes asked for, widths that no vector
divides, lists not filled."""


class TopK(Operation[TopKProblem]):
    name = "top_k"
    problem = TopKProblem
    in_pytorch = reference
    ladder = Ladder("top_k", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: TopKProblem) -> tuple[str, ...]:
        return ("block_per_row",)


TOP_K = TopK()
