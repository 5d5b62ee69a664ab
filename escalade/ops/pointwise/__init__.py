"""Any function of single elements: `pointwise` is the operator, `Pointwise` the operation with its ladder."""

from escalade.ops.pointwise.op import pointwise
from escalade.ops.pointwise.operation import POINTWISE, Pointwise
from escalade.ops.pointwise.problem import PointwiseProblem, View

__all__ = ["POINTWISE", "Pointwise", "PointwiseProblem", "View", "pointwise"]
