"""Reductions as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.expressions import Expression
from escalade.ops.shared import activation
from escalade.ops.shared.rows import check_fields

KINDS = ("sum", "mean", "max", "min", "var", "logsumexp")


@dataclass(frozen=True)
class ReduceProblem(Named):
    """y[o][i] = activated(kind over r of before(x[o][r][i])); x is [batch][reduced][inner], y [batch][inner].

    `before` is an expression in `x`, empty for x itself. A variance divides the squared distances from the mean by the
    number of elements less `correction`. States are fp32, whatever dtype x and y are.
    """

    NAME: ClassVar = NamePattern(
        "reduction",
        r"{kind}_{reduced}x{inner}_b{batch}[_less{correction}][\{{before:text}\}]{relu?_relu}"
        + activation.IN_NAME,
    )

    kind: str
    batch: int
    reduced: int
    inner: int = 1
    correction: float = 0.0
    before: str = ""
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        require("reduce", "kind", self.kind, KINDS)
        check_fields("reduce", self, DTYPES, {"reduced": self.reduced, "inner": self.inner})
        if not math.isfinite(self.correction) or (self.correction and self.kind != "var"):
            raise UnsupportedError(f"a correction of {self.correction}: it is a number, and a variance's")
        if self.before:
            expression = Expression.parse(self.before)
            if expression.inputs != ("x",) or len(expression.results) != 1:
                raise UnsupportedError(
                    f"{self.before!r} in front of a reduction: it is one result computed from x, such as x * x"
                )
            object.__setattr__(self, "before", "" if expression.is_identity else expression.text)
        activation.settle(self)

    @property
    def results(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.results * self.reduced

    @property
    def flops(self) -> int:
        """One an element; of a variance a difference, a square and two sums, of a logsumexp as many."""
        return self.elements * (4 if self.kind in ("var", "logsumexp") else 1)

    @property
    def bytes(self) -> int:
        return (self.elements + self.results) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A running sum, and of a logsumexp exponents of some 8 in size; of a variance two sums, one of squares."""
        sums = 2 if self.kind == "var" else 1
        return sums * 2.0**-24 * (8 + math.sqrt(1 + self.reduced / 6))
