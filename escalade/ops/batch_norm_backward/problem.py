"""The gradients of batch normalisation in training as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.expressions import Expression
from escalade.ops.shared.channels import SIZES, check_channelwise
from escalade.ops.shared.images import Images

MASKS = ("none", "x", "output")
"""How the mask of a ReLU behind the normalisation is found: there is none, again from x, or by the ReLU's output."""


@dataclass(frozen=True)
class BatchNormBackwardProblem(Images, Named):
    """The gradients of y = relu((x - mean) * rstd * weight + bias + residual), relu and residual optional, where mean
    and rstd are x's own.

    Buffers `gradient`, which is that of y, and x are of `dtype`; `mean`, `rstd` (one over the deviation), `weight` and
    the results `weight_gradient` and `bias_gradient` are fp32 and one a channel. The gradient of x is buffer `y`. With
    a mask, gradients pass where the ReLU's output is positive: by `output`, or by x, for which `bias` is there. With
    `residual` the gradient in front of the ReLU is the result `residual_gradient`. y may be the gradient or x.

    Behind another function of single elements than ReLU, `function` says what it leaves of a gradient: an expression in
    `gradient` and in `x`, which there is what the function was applied to; that is found again by x.
    """

    NAME: ClassVar = NamePattern(
        "gradients of batch normalization",
        SIZES + r"[_by{mask:x|output}]{residual?+res}[\[{function:text}\]]",
    )

    mask: str = "none"
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    function: str = ""

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_norm_backward", self)
        require("batch_norm_backward", "mask", self.mask, MASKS)
        if self.residual and self.mask != "output":
            raise UnsupportedError(
                f"a residual's gradient with the mask {self.mask!r}: behind a ReLU it is found by the output, and "
                "without one the residual's gradient is y's own"
            )

        if self.function:
            self._settle_function()

    def _settle_function(self) -> None:
        """Says it in the one way there is, in canonical form."""
        expression = Expression.parse(self.function)
        if set(expression.inputs) != {"gradient", "x"} or len(expression.results) != 1 or self.mask != "x":
            raise UnsupportedError(
                f"a function of {self.function!r} with the mask {self.mask!r}: it is one result computed from gradient "
                "and x, such as gradient * sigmoid(x), where what it was applied to is found again by x"
            )
        object.__setattr__(self, "function", expression.text)

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

    @property
    def flops(self) -> int:
        """Two sums with a difference and a product; then a difference, two products and two sums."""
        return (9 + (self.mask != "none")) * self.elements

    @property
    def bytes(self) -> int:
        """The gradient, x and the output read once, and each result written."""
        return self._bytes(3 + (self.mask == "output") + self.residual)

    @property
    def traffic(self) -> int:
        """What two passes move: the second reads the gradient and x again, and the output unless the first has left the
        gradient in front of the ReLU."""
        by_output = self.mask == "output"
        return self._bytes(5 + by_output + (1 if self.residual else by_output))

    def _bytes(self, passes: int) -> int:
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + 24 * self.channels

    @property
    def rounding(self) -> float:
        """256 running sums side by side, each a random walk of its rounding errors; then five more roundings."""
        return 2.0**-24 * math.sqrt(6 + self.count / 256 / 6)
