"""The gradients of a small multilayer perceptron: `mlp_backward` is the operator, `MlpBackward` the operation."""

from escalade.ops.mlp_backward.ladder import MlpBackward
from escalade.ops.mlp_backward.op import mlp_backward
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

__all__ = ["MlpBackward", "MlpBackwardProblem", "mlp_backward"]
