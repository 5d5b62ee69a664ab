"""Pointwise programs: a graph of element-wise functions that can be printed, evaluated and compiled."""

from escalade.ops.expressions.expression import IDENTITY, Expression, FunctionCall, Operand, fast_functions
from escalade.ops.expressions.functions import FUNCTIONS

__all__ = ["FUNCTIONS", "IDENTITY", "Expression", "FunctionCall", "Operand", "fast_functions"]
