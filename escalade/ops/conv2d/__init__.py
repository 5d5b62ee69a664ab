"""Two-dimensional convolution: `conv2d` is the operator, `Conv2d` the operation with its ladder."""

from escalade.ops.conv2d.op import conv2d
from escalade.ops.conv2d.operation import CONV2D, Conv2dOperation
from escalade.ops.conv2d.problem import Conv2dProblem

__all__ = ["CONV2D", "Conv2dOperation", "Conv2dProblem", "conv2d"]
