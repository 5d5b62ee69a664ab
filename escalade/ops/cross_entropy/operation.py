"""The operation cross_entropy, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.cross_entropy import reference
from escalade.ops.cross_entropy.problem import CrossEntropyProblem
from escalade.ops.cross_entropy.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.cross_entropy.rungs.rows import RUNGS
from escalade.ops.shared.losses import room_for_loss
from escalade.ops.shared.rows import LAYOUTS


class CrossEntropy(Operation[CrossEntropyProblem]):
    name = "cross_entropy"
    problem = CrossEntropyProblem
    in_pytorch = reference
    ladder = Ladder("cross_entropy", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: CrossEntropyProblem) -> tuple[str, ...]:
        return ("part_of_warp", "block_per_row")

    def further_outputs(self, problem: CrossEntropyProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return room_for_loss(problem, device)

    def further_references(self, problem: CrossEntropyProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        if not problem.gradient:
            return {}
        return {"loss": reference.loss(problem, inputs["x"].double(), inputs["target"])}


CROSS_ENTROPY = CrossEntropy()
