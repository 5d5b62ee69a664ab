"""The operation copy, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.copy import reference
from escalade.ops.copy.problem import LAYOUTS, CopyProblem
from escalade.ops.copy.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.copy.rungs.naive import NAIVE
from escalade.ops.copy.rungs.tiled import TILED
from escalade.ops.copy.rungs.vectorised import VECTORISED


class Copy(Operation[CopyProblem]):
    name = "copy"
    problem = CopyProblem
    in_pytorch = reference
    ladder = Ladder("copy", (NAIVE, VECTORISED, TILED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: CopyProblem) -> tuple[str, ...]:
        return ("tiled", "vectorised", "naive")


COPY = Copy()
