"""The mean over windows: `avg_pool2d` is the operator, `AvgPool2d` the operation with its ladder."""

from escalade.ops.avg_pool2d.op import avg_pool2d
from escalade.ops.avg_pool2d.operation import AVG_POOL2D, AvgPool2d
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem

__all__ = ["AVG_POOL2D", "AvgPool2d", "AvgPool2dProblem", "avg_pool2d"]
