"""The statistics of a batch: `batch_statistics` is the operator, `BatchStatistics` the operation with its ladder."""

from escalade.ops.batch_statistics.op import batch_statistics
from escalade.ops.batch_statistics.operation import BATCH_STATISTICS, BatchStatistics
from escalade.ops.batch_statistics.problem import BatchStatisticsProblem

__all__ = ["BATCH_STATISTICS", "BatchStatistics", "BatchStatisticsProblem", "batch_statistics"]
