"""Softmax as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.shared.rows import check_fields

_NAME = re.compile(r"(?P<classes>\d+)_b(?P<batch>\d+)(_inner(?P<inner>\d+))?")


@dataclass(frozen=True)
class SoftmaxProblem:
    """y[row] = exp(x[row] - max) / sum(exp(x[row] - max)); x and y are [batch][classes][inner] of one dtype."""

    batch: int
    classes: int
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Rows of each of the batch, which lie side by side, and elements from one of a row to its next: the pixels of an
    image, for its channels in NCHW."""

    def __post_init__(self) -> None:
        check_fields("softmax", self, DTYPES, {"classes": self.classes, "inner": self.inner})

    @staticmethod
    def parse(name: str, dtype: str = "fp32") -> SoftmaxProblem:
        """The problem of a name such as `1000_b32`."""
        found = match_name(
            _NAME,
            name,
            "softmax; the form is 1000_b32: classes, _b rows, and _inner64 where so many lie side by side",
        )
        return SoftmaxProblem(
            int(found["batch"]), int(found["classes"]), dtype, inner=int(found["inner"] or 1)
        )

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        return f"{self.classes}_b{self.batch}" + (f"_inner{self.inner}" if self.inner > 1 else "")

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
