"""Batch normalisation's gradients: `batch_norm_backward` is the operator, `BatchNormBackward` the operation."""

from escalade.ops.batch_norm_backward.op import batch_norm_backward
from escalade.ops.batch_norm_backward.operation import BATCH_NORM_BACKWARD, BatchNormBackward
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem

__all__ = ["BATCH_NORM_BACKWARD", "BatchNormBackward", "BatchNormBackwardProblem", "batch_norm_backward"]
