"""A maximum's gradient: `max_pool2d_backward` is the operator, `MaxPool2dBackward` the operation with its ladder."""

from escalade.ops.max_pool2d_backward.op import max_pool2d_backward
from escalade.ops.max_pool2d_backward.operation import MAX_POOL2D_BACKWARD, MaxPool2dBackward
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem

__all__ = ["MAX_POOL2D_BACKWARD", "MaxPool2dBackward", "MaxPool2dBackwardProblem", "max_pool2d_backward"]
