"""The sum of two arrays as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import Operand, check


@dataclass(frozen=True)
class AddProblem(Named):
    """y = x + residual over `elements` elements, then max(y, 0) if `relu`. y may be x or the residual."""

    NAME: ClassVar = NamePattern(
        "sum",
        "add{relu?_relu}_{elements}",
    )

    elements: int
    relu: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        check("add", self.elements, self.batch, self.dtype, self.layout)

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
