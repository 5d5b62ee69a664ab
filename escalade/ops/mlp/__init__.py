"""A small multilayer perceptron: `mlp` is the operator, `Mlp` the operation with its ladder."""

from escalade.ops.mlp.op import mlp
from escalade.ops.mlp.operation import MLP, Mlp
from escalade.ops.mlp.problem import Layer, MlpProblem

__all__ = ["MLP", "Layer", "Mlp", "MlpProblem", "mlp"]
