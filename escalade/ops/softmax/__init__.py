"""Softmax along the last dimension: `softmax` is the operator, `Softmax` the operation with its ladder."""

from escalade.ops.softmax.op import softmax
from escalade.ops.softmax.operation import SOFTMAX, Softmax
from escalade.ops.softmax.problem import SoftmaxProblem

__all__ = ["SOFTMAX", "Softmax", "SoftmaxProblem", "softmax"]
