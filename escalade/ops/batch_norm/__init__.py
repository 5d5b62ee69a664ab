"""Batch normalisation: `batch_norm` is the operator, `BatchNorm` the operation with its ladder."""

from escalade.ops.batch_norm.op import batch_norm
from escalade.ops.batch_norm.operation import BATCH_NORM, BatchNorm
from escalade.ops.batch_norm.problem import BatchNormProblem

__all__ = ["BATCH_NORM", "BatchNorm", "BatchNormProblem", "batch_norm"]
