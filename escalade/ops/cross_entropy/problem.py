"""The cross-entropy as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.losses import REDUCTIONS
from escalade.ops.shared.rows import check_fields
from escalade.ops.softmax.problem import softmax_rounding

TARGET_BYTES = 8


@dataclass(frozen=True)
class CrossEntropyProblem(Named):
    """loss = the mean or sum over rows of -log softmax(x)[target]; with `gradient` scale * d loss / d x as well.

    With a `smoothing` s the target has 1 - s of what is wanted, and s is spread over all classes. Rows whose target is
    `ignored` do not count. The loss is fp32, `scale` an fp32 number on the device, targets are int64; x and the
    gradient, [batch][classes], are of `dtype`. With a gradient that one is the buffer y, without it the loss is.
    """

    NAME: ClassVar = NamePattern(
        "cross-entropy",
        "{reduction}_{classes}_b{batch}[_smooth{smoothing}][_ignore{ignored}]{gradient?_gradient}",
    )

    batch: int
    classes: int
    reduction: str = "mean"
    smoothing: float = 0.0
    ignored: int | None = None
    gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        check_fields("cross_entropy", self, DTYPES, {"classes": self.classes})
        require("cross_entropy", "reduction", self.reduction, REDUCTIONS)
        if not 0 <= self.smoothing <= 1:
            raise UnsupportedError(f"a label smoothing of {self.smoothing}: it is between 0 and 1")

    @property
    def counts_first(self) -> bool:
        """Whether the rows that count have to be known before the first of them is done."""
        return self.reduction == "mean" and self.ignored is not None

    @property
    def elements(self) -> int:
        return self.batch * self.classes

    @property
    def flops(self) -> int:
        """A comparison, a difference, an exponential and an addition an element; a product and a difference more for a
        gradient."""
        return self.elements * (6 if self.gradient else 4)

    @property
    def bytes(self) -> int:
        passes = 2 if self.gradient else 1
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + self.batch * TARGET_BYTES

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)
