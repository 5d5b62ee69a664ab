"""Sums of neighbouring taps of filters, turned around, as a problem."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.shared.images import (
    Images,
    check_problem,
    pair_pattern,
    read_sizes,
    require_32_bits,
    spell_pair,
)

LAYOUTS = ("nhwc",)
_NAME = re.compile(rf"(?P<channels>\d+)_{pair_pattern('size')}(?P<zeros>_zeros)?_b(?P<batch>\d+)")


@dataclass(frozen=True)
class FilterSumsProblem(Images):
    """y[c, f, i, j] = the sum of x[f, c] over the window of two by two taps at (rows - 1 - i, columns - 1 - j).

    x is [filters, channels, height, width], its filters the batch, and y has rows * columns taps, as many as there are
    such windows; with `zeros` there is a tap of zeros around x. So a filter over pixels that are there four times is
    one over the pixels themselves, from the other side, and without zeros its gradient is the filter's again.
    """

    zeros: bool = False
    dtype: str = "fp32"
    layout: str = "nhwc"

    def __post_init__(self) -> None:
        check_problem("filter_sums", self, DTYPES, LAYOUTS)
        if min(self.rows, self.columns) < 1:
            raise UnsupportedError(f"filters of {self.height} x {self.width} have no window of 2 x 2 taps")
        require_32_bits("filter_sums", max(self.channels, self.batch) * (self.height + 1) * (self.width + 1))

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nhwc") -> FilterSumsProblem:
        """The problem of a name such as `128_3_zeros_b256`."""
        found = match_name(
            _NAME,
            name,
            "sum of filters; the form is 128_3_zeros_b256: channels, size of a filter (3 or 3x5), _zeros if there is a "
            "tap of zeros around it, and _b filters",
        )
        return FilterSumsProblem(*read_sizes(found), bool(found["zeros"]), dtype, layout)

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        size = spell_pair((self.height, self.width))
        return f"{self.channels}_{size}{'_zeros' if self.zeros else ''}_b{self.batch}"

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
