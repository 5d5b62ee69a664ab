"""The sizes of a convolution, or of the gradient of one, as rungs for few channels or few filters take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from escalade.ops.conv2d.problem import Conv2dProblem

SPLIT_PRODUCTS = 3
"""Products of tensor cores for one of fp32, whose factors are split into two TF32 parts."""


@dataclass(frozen=True)
class Geometry:
    """What a launch convolves: a problem's own images, or those of the gradient of one. Pairs are height and width."""

    dtype: str
    element_bytes: int
    batch: int
    channels: int
    filters: int
    image: tuple[int, int]
    output: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, p: Conv2dProblem) -> Self:
        return cls(
            p.dtype, p.element_bytes, p.batch, p.channels, p.filters, (p.height, p.width),
            (p.output_height, p.output_width), (p.filter_height, p.filter_width), p.stride, p.padding, p.dilation,
        )  # fmt: skip

    @property
    def products(self) -> int:
        """Products of tensor cores for one."""
        return SPLIT_PRODUCTS if self.dtype == "fp32" else 1

    @property
    def parts(self) -> int:
        """Parts of a number."""
        return 2 if self.products > 1 else 1
