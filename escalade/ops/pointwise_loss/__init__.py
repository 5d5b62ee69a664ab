"""Losses that are sums of functions of single elements: `pointwise_loss` and `mse_loss` are the operators,
`PointwiseLoss` the operation with its ladder."""

from escalade.ops.pointwise_loss.op import MSE, mse_loss, pointwise_loss, pointwise_loss_with_gradient
from escalade.ops.pointwise_loss.operation import POINTWISE_LOSS, PointwiseLoss
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem

__all__ = [
    "MSE",
    "POINTWISE_LOSS",
    "PointwiseLoss",
    "PointwiseLossProblem",
    "mse_loss",
    "pointwise_loss",
    "pointwise_loss_with_gradient",
]
