"""The operation pointwise_loss, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.pointwise_loss import reference
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem
from escalade.ops.pointwise_loss.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.pointwise_loss.rungs.packs import RUNGS
from escalade.ops.shared.losses import room_for_loss
from escalade.ops.shared.pointwise import LAYOUTS


class PointwiseLoss(Operation[PointwiseLossProblem]):
    name = "pointwise_loss"
    problem = PointwiseLossProblem
    in_pytorch = reference
    ladder = Ladder("pointwise_loss", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: PointwiseLossProblem) -> tuple[str, ...]:
        return ("vectorised",)

    def further_outputs(self, problem: PointwiseLossProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return room_for_loss(problem, device)

    def further_references(self, problem: PointwiseLossProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return {"loss": reference.loss(problem, inputs, torch.float64)} if problem.gradient else {}


POINTWISE_LOSS = PointwiseLoss()
