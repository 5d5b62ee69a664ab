"""The mean over a grid of windows as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared.images import (
    Images,
    check_problem,
    require_32_bits,
)


@dataclass(frozen=True)
class AdaptiveAvgPool2dProblem(Images, Named):
    """y[oh, ow] = mean of x over rows from floor(oh * H / OH) to ceil((oh + 1) * H / OH), and columns likewise."""

    NAME: ClassVar = NamePattern(
        "pooling",
        "{channels}_{height,width}to{output}_b{batch}",
    )

    output: tuple[int, int] = (1, 1)
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_height(self) -> int:
        return self.output[0]

    @property
    def output_width(self) -> int:
        return self.output[1]

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    @property
    def largest_window(self) -> int:
        """Pixels; windows of one problem differ by a row and a column at most."""
        return _widest(self.height, self.output_height) * _widest(self.width, self.output_width)

    @property
    def flops(self) -> int:
        """Additions of the means."""
        rows, columns = (_widths(self.height, self.output_height), _widths(self.width, self.output_width))
        return self.batch * self.channels * rows * columns

    @property
    def bytes(self) -> int:
        return (self.elements + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + self.largest_window / 6)


def _window(at: int, size: int, outputs: int) -> int:
    return -(-(at + 1) * size // outputs) - at * size // outputs


def _widest(size: int, outputs: int) -> int:
    """Windows repeat after outputs / gcd; the widest begins latest within a pixel and ends earliest within one."""
    return max(_window(at, size, outputs) for at in range(outputs // math.gcd(size, outputs)))


def _widths(size: int, outputs: int) -> int:
    """The widths of all windows together."""
    return sum(_window(at, size, outputs) for at in range(outputs))


def _check(p: AdaptiveAvgPool2dProblem) -> None:
    check_problem("adaptive_avg_pool2d", p)
    require_at_least(1, {"output": min(p.output)})
    check_pitches(p, x=p.channels, y=p.channels)
    apart = max(p.channels, p.x_pitch, p.y_pitch)
    require_32_bits("adaptive_avg_pool2d", apart * max(p.pixels, p.output_height * p.output_width))
    for size, outputs in ((p.height, p.output_height), (p.width, p.output_width)):
        if (size + 1) * outputs >= 2**31:
            raise UnsupportedError(
                f"{size} pixels into {outputs}: adaptive_avg_pool2d counts their product in 32 bits"
            )
