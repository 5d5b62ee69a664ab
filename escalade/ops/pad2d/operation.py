"""The operation pad2d, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.pad2d import reference
from escalade.ops.pad2d.problem import Pad2dProblem
from escalade.ops.pad2d.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.pad2d.rungs.copies import NAIVE, VECTORISED
from escalade.ops.pad2d.rungs.runs import RUNS
from escalade.ops.shared.images import LAYOUTS


class Pad2d(Operation[Pad2dProblem]):
    name = "pad2d"
    problem = Pad2dProblem
    in_pytorch = reference
    ladder = Ladder("pad2d", (NAIVE, RUNS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Pad2dProblem) -> tuple[str, ...]:
        return ("vectorised", "runs", "naive")


PAD2D = Pad2d()
