"""A loss of single elements as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.expressions import Expression
from escalade.ops.shared.losses import REDUCTIONS
from escalade.ops.shared.pointwise import LAYOUTS, check

INPUTS = ("x", "target")


@dataclass(frozen=True)
class PointwiseLossProblem(Named):
    """loss = the mean or sum of term(x, target) over all elements; with `gradient` scale * d loss / d x as well.

    `expression` is the term and its derivative by x. The loss is fp32, and `scale` an fp32 number on the device; x and
    the gradient are of `dtype`, and so is the target unless it has a type of its own. With a gradient that one is the
    buffer y, without it the loss is.
    """

    NAME: ClassVar = NamePattern(
        "loss",
        r"{reduction}_{elements}\[{expression:text}\]{gradient?_gradient}[_target{target}]",
    )

    elements: int
    expression: str
    reduction: str = "mean"
    gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    target: str = ""
    """The target's type; empty: `dtype`."""
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        check("pointwise_loss", self.elements, self.batch, self.dtype, self.layout)
        require("pointwise_loss", "layout", self.layout, LAYOUTS)
        require("pointwise_loss", "dtype", self.dtype, DTYPES)
        require("pointwise_loss", "target", self.target_dtype, DTYPES)
        require("pointwise_loss", "reduction", self.reduction, REDUCTIONS)
        if self.elements < 1:
            raise UnsupportedError("a loss of no elements: pointwise_loss takes at least one")
        if not set(program.inputs) <= set(INPUTS) or len(program.results) != 2:
            raise UnsupportedError(
                f"{program.text!r} as a loss: it has two results computed from x and target, an element's loss and "
                "its derivative by x, such as square(x - target), 2 * (x - target)"
            )

    @property
    def target_dtype(self) -> str:
        return self.target or self.dtype

    @property
    def program(self) -> Expression:
        """What is computed of each element: the term, and the derivative where it is asked for."""
        whole = Expression.parse(self.expression)
        return whole if self.gradient else Expression.of(whole.calls, whole.results[:1])

    @property
    def factor(self) -> float:
        """What the sum is multiplied by."""
        return 1 / self.elements if self.reduction == "mean" else 1.0

    @property
    def flops(self) -> int:
        return self.elements * (1 + len(self.program.calls))

    @property
    def bytes(self) -> int:
        own = ELEMENT_BYTES[self.dtype] * (2 if self.gradient else 1)
        return self.elements * (own + ELEMENT_BYTES[self.target_dtype])

    @property
    def rounding(self) -> float:
        """Each function rounds once; the sums are of few numbers each, of threads, warps and blocks."""
        return 2.0**-24 * (8 + len(self.program.calls))
