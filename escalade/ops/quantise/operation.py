"""The operation quantise, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.quantise import reference
from escalade.ops.quantise.problem import QuantiseProblem
from escalade.ops.quantise.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.quantise.rungs.pointwise import RUNGS
from escalade.ops.shared import pointwise


class Quantise(Operation[QuantiseProblem]):
    name = "quantise"
    problem = QuantiseProblem
    in_pytorch = reference
    ladder = Ladder("quantise", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: QuantiseProblem) -> tuple[str, ...]:
        return ("vectorised",)


QUANTISE = Quantise()
