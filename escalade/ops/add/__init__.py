"""The sum of two tensors: `add` is the operator, `Add` the operation with its ladder."""

from escalade.ops.add.op import add
from escalade.ops.add.operation import ADD, Add
from escalade.ops.add.problem import AddProblem

__all__ = ["ADD", "Add", "AddProblem", "add"]
