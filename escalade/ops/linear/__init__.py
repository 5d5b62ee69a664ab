"""The fully connected layer: `linear` is the operator, `Linear` the operation with its ladder."""

from escalade.ops.linear.op import linear
from escalade.ops.linear.operation import LINEAR, Linear
from escalade.ops.linear.problem import LinearProblem

__all__ = ["LINEAR", "Linear", "LinearProblem", "linear"]
