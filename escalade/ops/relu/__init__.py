"""The rectifier: `relu` and `relu_` are the operators, `Relu` the operation with its ladder."""

from escalade.ops.relu.op import relu, relu_
from escalade.ops.relu.operation import RELU, Relu
from escalade.ops.relu.problem import ReluProblem

__all__ = ["RELU", "Relu", "ReluProblem", "relu", "relu_"]
