"""The statistics of a batch as an operation, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.batch_statistics import reference
from escalade.ops.batch_statistics.problem import BatchStatisticsProblem
from escalade.ops.batch_statistics.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.batch_statistics.rungs.statistics import RUNGS
from escalade.ops.shared.images import LAYOUTS


class BatchStatistics(Operation[BatchStatisticsProblem]):
    name = "batch_statistics"
    problem = BatchStatisticsProblem
    in_pytorch = reference
    ladder = Ladder("batch_statistics", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchStatisticsProblem) -> tuple[str, ...]:
        return ("split",)

    def further_outputs(
        self, problem: BatchStatisticsProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return {name: torch.empty(problem.channels, device=device) for name in problem.for_training}

    def further_references(self, problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return reference.for_training(problem, inputs)


BATCH_STATISTICS = BatchStatistics()
