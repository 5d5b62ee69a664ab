"""The mean over a grid of windows: `adaptive_avg_pool2d` is the operator, `AdaptiveAvgPool2d` the operation."""

from escalade.ops.adaptive_avg_pool2d.op import adaptive_avg_pool2d
from escalade.ops.adaptive_avg_pool2d.operation import ADAPTIVE_AVG_POOL2D, AdaptiveAvgPool2d
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem

__all__ = ["ADAPTIVE_AVG_POOL2D", "AdaptiveAvgPool2d", "AdaptiveAvgPool2dProblem", "adaptive_avg_pool2d"]
