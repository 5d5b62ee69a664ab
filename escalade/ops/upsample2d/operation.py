"""The operation upsample2d, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.images import LAYOUTS
from escalade.ops.upsample2d import reference
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.upsample2d.rungs.doubled import DOUBLED
from escalade.ops.upsample2d.rungs.naive import NAIVE
from escalade.ops.upsample2d.rungs.runs import RUNS
from escalade.ops.upsample2d.rungs.vectorised import VECTORISED


class Upsample2d(Operation[Upsample2dProblem]):
    name = "upsample2d"
    problem = Upsample2dProblem
    in_pytorch = reference
    ladder = Ladder("upsample2d", (NAIVE, RUNS, DOUBLED, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Upsample2dProblem) -> tuple[str, ...]:
        return ("vectorised", "doubled", "runs", "naive")


UPSAMPLE2D = Upsample2d()
