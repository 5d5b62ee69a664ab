"""The operation add, with its ladder."""

from __future__ import annotations

from escalade.ops.add import reference
from escalade.ops.add.problem import AddProblem
from escalade.ops.add.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.add.rungs.pointwise import RUNGS
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared import pointwise


class Add(Operation[AddProblem]):
    name = "add"
    problem = AddProblem
    in_pytorch = reference
    ladder = Ladder("add", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: AddProblem) -> tuple[str, ...]:
        return ("vectorised",)


ADD = Add()
