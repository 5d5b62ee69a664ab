"""Quantisation to FP8: `quantise` is the operator, `Quantise` the operation with its ladder."""

from escalade.ops.quantise.ladder import Quantise
from escalade.ops.quantise.op import quantise
from escalade.ops.quantise.problem import QuantiseProblem

__all__ = ["Quantise", "QuantiseProblem", "quantise"]
