"""The mean over windows as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.naming import NamePattern
from escalade.ops.shared import prologue
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows


@dataclass(frozen=True)
class AvgPool2dProblem(WindowedImages):
    """y[oh, ow] = the sum of x over the window of `kernel` pixels at (oh, ow) * stride - padding, divided.

    What the padding adds is zero. The divisor is the number of pixels of the window in the image with its padding, or
    in the image alone without `count_padding`, or `divisor` unless that is 0.

    With a `prologue`, x is what that makes of its pixels, rounded to the dtype: an expression in `x`, in `gain` and
    `shift`, fp32 vectors of a number a channel, and in `gate`, [N][C] in the dtype.
    """

    NAME: ClassVar = NamePattern(
        "pooling",
        f"{WINDOWS}_b{{batch}}{{ceil_mode?_ceil}}{{count_padding?:_inside}}[_by{{divisor}}]{prologue.IN_NAME}",
    )

    count_padding: bool = True
    divisor: int = 0
    prologue: str = ""

    def __post_init__(self) -> None:
        check_windows("avg_pool2d", self)
        prologue.settle(self)
        if not 0 <= self.divisor < 2**31:
            raise UnsupportedError(
                f"divisor of {self.divisor}: avg_pool2d takes 1 to 2^31 - 1, or 0 for none"
            )

    @property
    def bytes(self) -> int:
        return super().bytes + prologue.operand_bytes(self)

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + math.prod(self.kernel) / 6)
