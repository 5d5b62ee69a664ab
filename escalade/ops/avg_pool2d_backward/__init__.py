"""A mean's gradient: `avg_pool2d_backward` is the operator, `AvgPool2dBackward` the operation with its ladder."""

from escalade.ops.avg_pool2d_backward.op import avg_pool2d_backward
from escalade.ops.avg_pool2d_backward.operation import AVG_POOL2D_BACKWARD, AvgPool2dBackward
from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem

__all__ = ["AVG_POOL2D_BACKWARD", "AvgPool2dBackward", "AvgPool2dBackwardProblem", "avg_pool2d_backward"]
