"""Softmax along the last dimension: `softmax` is the operator, `Softmax` the operation with its ladder."""

from escalade.ops.softmax.ladder import Softmax
from escalade.ops.softmax.op import softmax
from escalade.ops.softmax.problem import SoftmaxProblem

__all__ = ["Softmax", "SoftmaxProblem", "softmax"]
