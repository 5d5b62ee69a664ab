"""The gradient of a mean over windows as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.gradient_problem import GradientProblem
from escalade.ops.shared.windowed import sharing


@dataclass(frozen=True)
class AvgPool2dBackwardProblem(GradientProblem[AvgPool2dProblem]):
    """dx of y = avg_pool2d(x), from `gradient`, which is that of y; the result is buffer `y`.

    A pixel's gradient is the sum of those of the windows that see it, each divided as the window's sum was. A mean over
    all of an image is one window; so are those of a grid that divides it evenly.
    """

    def __post_init__(self) -> None:
        self.follow("avg_pool2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch:
            raise UnsupportedError(
                f"{f.name} has pixels that lie apart; avg_pool2d_backward takes dense images"
            )
        if f.prologue:
            raise UnsupportedError(f"{f.name} has a prologue, whose gradient is not a mean's")

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> AvgPool2dBackwardProblem:
        """The problem of a pool's name, such as `192_35_k3s1p1_b32`."""
        return AvgPool2dBackwardProblem(AvgPool2dProblem.parse(name, dtype, layout))

    @property
    def bytes(self) -> int:
        f = self.forward
        return (f.elements + f.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk. One over the
        divisor is rounded, and so is each product with it."""
        return 2.0**-24 * math.sqrt(3 + sharing(self.forward) / 6)
