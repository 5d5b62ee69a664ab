"""The gradient of conv2d's weights: `conv2d_weight_gradient` is the operator, `Conv2dWeightGradient` the operation."""

from escalade.ops.conv2d_weight_gradient.op import conv2d_weight_gradient
from escalade.ops.conv2d_weight_gradient.operation import (
    CONV2D_WEIGHT_GRADIENT,
    Conv2dWeightGradientOperation,
)
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

__all__ = [
    "CONV2D_WEIGHT_GRADIENT",
    "Conv2dWeightGradientOperation",
    "Conv2dWeightGradientProblem",
    "conv2d_weight_gradient",
]
