"""Softmax as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.rows import check_fields


@dataclass(frozen=True)
class SoftmaxProblem(Named):
    """y[row] = exp(x[row] - max) / sum(exp(x[row] - max)); x and y are [batch][classes][inner] of one dtype."""

    NAME: ClassVar = NamePattern(
        "softmax",
        "{classes}_b{batch}[_inner{inner}]",
    )

    batch: int
    classes: int
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Rows of each of the batch, which lie side by side, and elements from one of a row to its next: the pixels of an
    image, for its channels in NCHW."""

    def __post_init__(self) -> None:
        check_fields("softmax", self, DTYPES, {"classes": self.classes, "inner": self.inner})

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.classes

    @property
    def flops(self) -> int:
        """A comparison, a difference, an exponential, an addition and a product an element."""
        return 5 * self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)


def softmax_rounding(classes: int) -> float:
    """The rounding of a probability: logit - max, some 8 in size, rounded by 2^-24 of itself; then exp, sum and
    quotient."""
    return 2.0**-24 * (8 + math.sqrt(1 + classes / 6))
