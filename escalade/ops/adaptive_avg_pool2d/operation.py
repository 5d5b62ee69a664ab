"""The operation adaptive_avg_pool2d, with its ladder."""

from __future__ import annotations

from escalade.ops.adaptive_avg_pool2d import reference
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.adaptive_avg_pool2d.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.adaptive_avg_pool2d.rungs.lanes import LANES
from escalade.ops.adaptive_avg_pool2d.rungs.naive import NAIVE
from escalade.ops.adaptive_avg_pool2d.rungs.sliced import SLICED
from escalade.ops.adaptive_avg_pool2d.rungs.vectorised import VECTORISED
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.images import LAYOUTS


class AdaptiveAvgPool2d(Operation[AdaptiveAvgPool2dProblem]):
    name = "adaptive_avg_pool2d"
    problem = AdaptiveAvgPool2dProblem
    in_pytorch = reference
    ladder = Ladder("adaptive_avg_pool2d", (NAIVE, LANES, VECTORISED, SLICED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: AdaptiveAvgPool2dProblem) -> tuple[str, ...]:
        return ("sliced", "vectorised", "lanes", "naive")


ADAPTIVE_AVG_POOL2D = AdaptiveAvgPool2d()
