"""The statistics of a batch as an operation, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
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


BATCH_STATISTICS = BatchStatistics()
