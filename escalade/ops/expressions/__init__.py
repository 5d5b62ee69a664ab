"""Pointwise programs: any graph of functions of single elements, as one value that can be printed, run and compiled."""

from escalade.ops.expressions.expression import IDENTITY, Call, Expression, Operand, fast_functions
from escalade.ops.expressions.functions import FUNCTIONS

__all__ = ["FUNCTIONS", "IDENTITY", "Call", "Expression", "Operand", "fast_functions"]
