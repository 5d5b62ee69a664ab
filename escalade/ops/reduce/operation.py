"""The operation reduce, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.reduce import reference
from escalade.ops.reduce.problem import ReduceProblem
from escalade.ops.reduce.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.reduce.rungs.reductions import COLUMNS, NAIVE, ROWS
from escalade.ops.shared.rows import LAYOUTS


class Reduce(Operation[ReduceProblem]):
    name = "reduce"
    problem = ReduceProblem
    in_pytorch = reference
    ladder = Ladder("reduce", (NAIVE, ROWS, COLUMNS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: ReduceProblem) -> tuple[str, ...]:
        return ("rows", "columns")


REDUCE = Reduce()
