"""The operation pointwise, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.pointwise import reference
from escalade.ops.pointwise.problem import PointwiseProblem
from escalade.ops.pointwise.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.pointwise.rungs.pointwise import RUNGS
from escalade.ops.shared import pointwise


class Pointwise(Operation[PointwiseProblem]):
    name = "pointwise"
    problem = PointwiseProblem
    in_pytorch = reference
    ladder = Ladder("pointwise", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: PointwiseProblem) -> tuple[str, ...]:
        return ("vectorised", "naive")

    def further_outputs(self, problem: PointwiseProblem, device: torch.device) -> dict[str, torch.Tensor]:
        names = pointwise.result_names(problem.program)[1:]
        return {name: reference.empty_output(problem, device) for name in names}

    def further_references(self, problem: PointwiseProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        names = pointwise.result_names(problem.program)
        every = zip(names, reference.results(problem, inputs, torch.float64), strict=True)
        return dict(list(every)[1:])


POINTWISE = Pointwise()
