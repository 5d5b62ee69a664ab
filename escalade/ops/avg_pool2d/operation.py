"""The operation avg_pool2d, with its ladder."""

from __future__ import annotations

from escalade.ops.avg_pool2d import reference
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.avg_pool2d.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.avg_pool2d.rungs.naive import NAIVE
from escalade.ops.avg_pool2d.rungs.row_packs import ROW_PACKS
from escalade.ops.avg_pool2d.rungs.vectorised import VECTORISED
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.images import LAYOUTS


class AvgPool2d(Operation[AvgPool2dProblem]):
    name = "avg_pool2d"
    problem = AvgPool2dProblem
    in_pytorch = reference
    ladder = Ladder("avg_pool2d", (NAIVE, ROW_PACKS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def roundings(self, problem: AvgPool2dProblem) -> int:
        return super().roundings(problem) + bool(problem.prologue)

    def preferred(self, problem: AvgPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "row_packs", "naive")


AVG_POOL2D = AvgPool2d()
