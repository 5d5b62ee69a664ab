"""Batch normalisation in training as an operation, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.batch_norm_training import reference
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.batch_norm_training.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.batch_norm_training.rungs.passes import RUNGS
from escalade.ops.batch_norm_training.rungs.resident import RESIDENT
from escalade.ops.batch_statistics.reference import for_training
from escalade.ops.shared.images import LAYOUTS


class BatchNormTraining(Operation[BatchNormTrainingProblem]):
    name = "batch_norm_training"
    problem = BatchNormTrainingProblem
    in_pytorch = reference
    ladder = Ladder("batch_norm_training", (*RUNGS, RESIDENT))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: BatchNormTrainingProblem) -> tuple[str, ...]:
        return ("vectorised", "resident", "one_pass")

    def further_outputs(
        self, problem: BatchNormTrainingProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(problem.channels, device=device) for name in problem.statistics.for_training
        }

    def further_references(
        self, problem: BatchNormTrainingProblem, inputs: Tensors
    ) -> dict[str, torch.Tensor]:
        return for_training(problem.statistics, inputs)


BATCH_NORM_TRAINING = BatchNormTraining()
