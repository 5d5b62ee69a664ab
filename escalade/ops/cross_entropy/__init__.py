"""The cross-entropy of logits and classes: `cross_entropy` is the operator, `CrossEntropy` the operation with its
ladder."""

from escalade.ops.cross_entropy.op import cross_entropy, cross_entropy_with_gradient
from escalade.ops.cross_entropy.operation import CROSS_ENTROPY, CrossEntropy
from escalade.ops.cross_entropy.problem import CrossEntropyProblem

__all__ = [
    "CROSS_ENTROPY",
    "CrossEntropy",
    "CrossEntropyProblem",
    "cross_entropy",
    "cross_entropy_with_gradient",
]
