"""Reductions: `reduce` is the operator, `Reduce` the operation with its ladder."""

from escalade.ops.reduce.op import reduce
from escalade.ops.reduce.operation import REDUCE, Reduce
from escalade.ops.reduce.problem import ReduceProblem

__all__ = ["REDUCE", "Reduce", "ReduceProblem", "reduce"]
