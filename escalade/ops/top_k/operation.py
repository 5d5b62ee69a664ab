"""The operation top_k, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.rows import LAYOUTS
from escalade.ops.top_k import reference
from escalade.ops.top_k.problem import TopKProblem
from escalade.ops.top_k.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.top_k.rungs.block_per_row import BLOCK_PER_ROW
from escalade.ops.top_k.rungs.per_row import NAIVE, WARP_PER_ROW


class TopK(Operation[TopKProblem]):
    name = "top_k"
    problem = TopKProblem
    in_pytorch = reference
    ladder = Ladder("top_k", (NAIVE, WARP_PER_ROW, BLOCK_PER_ROW))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: TopKProblem) -> tuple[str, ...]:
        return ("block_per_row",)


TOP_K = TopK()
