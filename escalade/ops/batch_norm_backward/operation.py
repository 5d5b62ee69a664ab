"""The gradients of batch normalisation as an operation, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.batch_norm_backward import reference
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem
from escalade.ops.batch_norm_backward.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.batch_norm_backward.rungs.naive import NAIVE
from escalade.ops.batch_norm_backward.rungs.resident import RESIDENT
from escalade.ops.batch_norm_backward.rungs.split import SPLIT, VECTORISED
from escalade.ops.shared.images import LAYOUTS


class BatchNormBackward(Operation[BatchNormBackwardProblem]):
    name = "batch_norm_backward"
    problem = BatchNormBackwardProblem
    in_pytorch = reference
    ladder = Ladder("batch_norm_backward", (NAIVE, SPLIT, VECTORISED, RESIDENT))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: BatchNormBackwardProblem) -> tuple[str, ...]:
        return ("vectorised", "resident", "split")

    def further_outputs(
        self, problem: BatchNormBackwardProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        found = {
            name: torch.empty(problem.channels, device=device)
            for name in ("weight_gradient", "bias_gradient")
        }
        if problem.residual:
            found["residual_gradient"] = self.output(problem, device)
        return found

    def further_references(
        self, problem: BatchNormBackwardProblem, inputs: Tensors
    ) -> dict[str, torch.Tensor]:
        _, weight_gradient, bias_gradient = reference.gradients(problem, inputs)
        found = {"weight_gradient": weight_gradient, "bias_gradient": bias_gradient}
        if problem.residual:
            found["residual_gradient"] = reference.masked(problem, inputs).double()
        return found


BATCH_NORM_BACKWARD = BatchNormBackward()
