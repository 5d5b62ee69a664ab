"""The sum of two arrays as a problem."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import Operand, check

_NAME = re.compile(r"add(?P<relu>_relu)?_(?P<elements>\d+)")


@dataclass(frozen=True)
class AddProblem:
    """y = x + residual over `elements` elements, then max(y, 0) if `relu`. y may be x or the residual."""

    elements: int
    relu: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        check("add", self.elements, self.batch, self.dtype, self.layout)

    @staticmethod
    def parse(name: str) -> AddProblem:
        found = match_name(_NAME, name, "sum; the form is add_802816, or add_relu_802816")
        return AddProblem(int(found["elements"]), bool(found["relu"]))

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        return f"add{'_relu' if self.relu else ''}_{self.elements}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, (1,), self.dtype) for name in self.program.inputs)

    @property
    def program(self) -> Expression:
        return Expression.parse("relu(x + residual)" if self.relu else "x + residual")

    @property
    def flops(self) -> int:
        return self.elements * (2 if self.relu else 1)

    @property
    def bytes(self) -> int:
        return 3 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return 2.0**-24
