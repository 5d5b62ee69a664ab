"""The operation relu, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.relu import reference
from escalade.ops.relu.problem import ReluProblem
from escalade.ops.relu.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.relu.rungs.pointwise import RUNGS
from escalade.ops.shared import pointwise


class Relu(Operation[ReluProblem]):
    name = "relu"
    problem = ReluProblem
    in_pytorch = reference
    ladder = Ladder("relu", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: ReluProblem) -> tuple[str, ...]:
        return ("vectorised",)


RELU = Relu()
