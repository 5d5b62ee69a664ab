"""The operation optimizer_step, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.optimizer_step import reference
from escalade.ops.optimizer_step.problem import LAYOUTS, OptimizerStepProblem
from escalade.ops.optimizer_step.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.optimizer_step.rungs.chunks import RUNGS


class OptimizerStep(Operation[OptimizerStepProblem]):
    name = "optimizer_step"
    problem = OptimizerStepProblem
    in_pytorch = reference
    ladder = Ladder("optimizer_step", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: OptimizerStepProblem) -> tuple[str, ...]:
        return ("vectorised",)

    def further_outputs(self, problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return reference.further_outputs(problem, device)

    def further_references(self, problem: OptimizerStepProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return reference.further(problem, inputs)


OPTIMIZER_STEP = OptimizerStep()
