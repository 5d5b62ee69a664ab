"""The squeeze_excite operation and its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.squeeze_excite import reference
from escalade.ops.squeeze_excite.problem import LAYOUTS, SqueezeExciteProblem
from escalade.ops.squeeze_excite.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.squeeze_excite.rungs.naive import NAIVE
from escalade.ops.squeeze_excite.rungs.one_launch import CLUSTER, ONE_BLOCK
from escalade.ops.squeeze_excite.rungs.sliced import SLICED


class SqueezeExcite(Operation[SqueezeExciteProblem]):
    name = "squeeze_excite"
    problem = SqueezeExciteProblem
    in_pytorch = reference
    ladder = Ladder("squeeze_excite", (NAIVE, ONE_BLOCK, CLUSTER, SLICED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: SqueezeExciteProblem) -> tuple[str, ...]:
        return ("sliced", "cluster", "one_block", "naive")


SQUEEZE_EXCITE = SqueezeExcite()
