"""Batch normalisation as an operation, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.batch_norm import reference
from escalade.ops.batch_norm.problem import BatchNormProblem
from escalade.ops.batch_norm.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.batch_norm.rungs.normalise import RUNGS
from escalade.ops.shared.images import LAYOUTS


class BatchNorm(Operation[BatchNormProblem]):
    name = "batch_norm"
    problem = BatchNormProblem
    in_pytorch = reference
    ladder = Ladder("batch_norm", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchNormProblem) -> tuple[str, ...]:
        return ("vectorised", "scaled")


BATCH_NORM = BatchNorm()
