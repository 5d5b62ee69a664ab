"""Quantisation to FP8: `quantise` is the operator, `Quantise` the operation with its ladder."""

from escalade.ops.quantise.op import quantise
from escalade.ops.quantise.operation import QUANTISE, Quantise
from escalade.ops.quantise.problem import QuantiseProblem

__all__ = ["QUANTISE", "Quantise", "QuantiseProblem", "quantise"]
