"""A convolution's input gradient: `conv2d_input_gradient` is the operator, `Conv2dInputGradient` the operation."""

from escalade.ops.conv2d_input_gradient.op import conv2d_input_gradient
from escalade.ops.conv2d_input_gradient.operation import CONV2D_INPUT_GRADIENT, Conv2dInputGradientOperation
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem

__all__ = [
    "CONV2D_INPUT_GRADIENT",
    "Conv2dInputGradientOperation",
    "Conv2dInputGradientProblem",
    "conv2d_input_gradient",
]
