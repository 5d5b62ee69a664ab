"""The rectifier, or its gradient, as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES, STORAGE
from escalade.ops.base.naming import NUMBER, Codec, Named, NamePattern
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import Operand, check


@dataclass(frozen=True)
class ReluProblem(Named):
    """y = min(max(x, 0), limit) over `elements` elements; without a limit max(x, 0). A NaN stays a NaN.

    With `backward`, dx from `gradient`, which is that of y, and from `output`, which is y: the gradient where y is
    between the bounds or a NaN, and 0 elsewhere. y is at a bound where x is at or past it; its upper bound is the limit
    as the dtype rounds it.
    """

    NAME: ClassVar = NamePattern(
        "rectifier",
        "relu[{limit}]{backward?_backward}_{elements}",
        limit=Codec(NUMBER, float, lambda limit: repr(float(limit)).removesuffix(".0")),
    )

    elements: int
    limit: float | None = None
    """The largest result; 6.0 is ReLU6."""
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""
    backward: bool = False

    def __post_init__(self) -> None:
        check("relu", self.elements, self.batch, self.dtype, self.layout)
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise UnsupportedError(
                f"limit of {self.limit}: it is a positive finite number, or None for no limit"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, (1,), self.dtype) for name in self.program.inputs)

    @property
    def program(self) -> Expression:
        if not self.backward:
            return Expression.parse("relu(x)" if self.limit is None else f"minimum(relu(x), {self.limit!r})")
        passes = "gradient"
        if self.limit is not None:
            largest = torch.tensor(self.limit, dtype=STORAGE[self.dtype], device="cpu").item()
            passes = f"where(output >= {largest!r}, 0, gradient)"
        return Expression.parse(f"where(output <= 0, 0, {passes})")

    @property
    def flops(self) -> int:
        return self.elements * (1 if self.limit is None else 2)

    @property
    def bytes(self) -> int:
        return (3 if self.backward else 2) * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return 2.0**-24
