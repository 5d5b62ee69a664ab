"""The gradients of a small multilayer perceptron: `mlp_backward` is the operator, `MlpBackward` the operation."""

from escalade.ops.mlp_backward.op import mlp_backward
from escalade.ops.mlp_backward.operation import MLP_BACKWARD, MlpBackward
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

__all__ = ["MLP_BACKWARD", "MlpBackward", "MlpBackwardProblem", "mlp_backward"]
