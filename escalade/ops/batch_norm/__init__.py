"""Batch normalisation and the statistics of a batch: two operators, and two operations with their ladders."""

from escalade.ops.batch_norm.op import batch_norm, batch_statistics
from escalade.ops.batch_norm.operation import BATCH_NORM, BATCH_STATISTICS, BatchNorm, BatchStatistics
from escalade.ops.batch_norm.problem import BatchNormProblem, BatchStatisticsProblem

__all__ = [
    "BATCH_NORM",
    "BATCH_STATISTICS",
    "BatchNorm",
    "BatchNormProblem",
    "BatchStatistics",
    "BatchStatisticsProblem",
    "batch_norm",
    "batch_statistics",
]
