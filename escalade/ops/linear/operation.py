"""The linear operation and its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.linear import reference
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.linear.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.linear.rungs import cuda_core, pooled, tensor_core
from escalade.ops.shared.rows import LAYOUTS


class Linear(Operation[LinearProblem]):
    name = "linear"
    problem = LinearProblem
    in_pytorch = reference
    ladder = Ladder(
        "linear",
        (
            cuda_core.NAIVE,
            cuda_core.TILED,
            cuda_core.WARP_PER_OUTPUT,
            tensor_core.TENSOR_CORE,
            tensor_core.TENSOR_CORE_SPLIT,
            pooled.POOL_FIRST,
            pooled.POOLED,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = LAYOUTS

    def preferred(self, problem: LinearProblem) -> tuple[str, ...]:
        if problem.pixels > 1:
            both = ("pool_first", "naive")
            return ("pooled", *both) if pooled.one_launch_pays(problem) else both
        return tuple(rung.name for rung in pooled.plain_rungs(problem))


LINEAR = Linear()
