"""Sums of neighbouring taps of filters, turned around, as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.images import (
    Images,
    check_problem,
    require_32_bits,
)

LAYOUTS = ("nhwc",)


@dataclass(frozen=True)
class FilterSumsProblem(Images, Named):
    """y[c, f, i, j] = the sum of x[f, c] over the window of two by two taps at (rows - 1 - i, columns - 1 - j).

    x is [filters, channels, height, width], its filters the batch, and y has rows * columns taps, as many as there are
    such windows; with `zeros` there is a tap of zeros around x. So a filter over pixels that are there four times is
    one over the pixels themselves, from the other side, and without zeros its gradient is the filter's again.
    """

    NAME: ClassVar = NamePattern(
        "sum of filters",
        "{channels}_{height,width}{zeros?_zeros}_b{batch}",
    )

    zeros: bool = False
    dtype: str = "fp32"
    layout: str = "nhwc"

    def __post_init__(self) -> None:
        check_problem("filter_sums", self, DTYPES, LAYOUTS)
        if min(self.rows, self.columns) < 1:
            raise UnsupportedError(f"filters of {self.height} x {self.width} have no window of 2 x 2 taps")
        require_32_bits("filter_sums", max(self.channels, self.batch) * (self.height + 1) * (self.width + 1))

    @property
    def rows(self) -> int:
        return self.height + 2 * self.zeros - 1

    @property
    def columns(self) -> int:
        return self.width + 2 * self.zeros - 1

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.rows * self.columns

    @property
    def flops(self) -> int:
        return 3 * self.output_elements

    @property
    def bytes(self) -> int:
        return (self.elements + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Three additions of fp32."""
        return 3 * 2.0**-24
