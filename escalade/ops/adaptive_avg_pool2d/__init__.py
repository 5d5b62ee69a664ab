"""The mean over a grid of windows: `adaptive_avg_pool2d` is the operator, `AdaptiveAvgPool2d` the operation."""

from escalade.ops.adaptive_avg_pool2d.ladder import AdaptiveAvgPool2d
from escalade.ops.adaptive_avg_pool2d.op import adaptive_avg_pool2d
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem

__all__ = ["AdaptiveAvgPool2d", "AdaptiveAvgPool2dProblem", "adaptive_avg_pool2d"]
