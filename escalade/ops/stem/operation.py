"""The stem operation and its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.stem import reference
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.stem.rungs import separate, sm90_streamed, sm90_warpgroup, tensor_core


class Stem(Operation[StemProblem]):
    name = "stem"
    problem = StemProblem
    in_pytorch = reference
    ladder = Ladder(
        "stem", (*separate.RUNGS, *tensor_core.RUNGS, *sm90_warpgroup.RUNGS, *sm90_streamed.RUNGS)
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = ("nhwc",)

    def preferred(self, problem: StemProblem) -> tuple[str, ...]:
        return ("streamed", "warpgroup", "pooled", "tensor_core", "separate")


STEM = Stem()
