"""An image at another size as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Codec, Named, NamePattern, spell_pair
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared.images import (
    Images,
    check_problem,
    require_32_bits,
)

MODES = {"nearest": 1, "nearest_exact": 1, "bilinear": 2, "bicubic": 4}
"""Pixels along each dimension that a result is made of."""


@dataclass(frozen=True)
class Upsample2dProblem(Images, Named):
    """y[oh, ow] = x at row (oh + 0.5) * step - 0.5 and the column likewise, from the nearest pixel or between several.

    The step is the image's size divided by the result's, or 1 / factor where a factor is given, which PyTorch takes
    for as exact as the sizes that it has rounded. With `corners` the corners of both images are the same points: the
    row is oh * (H - 1) / (OH - 1). The nearest pixel is PyTorch's: at oh * step rounded down, in `nearest_exact` at
    (oh + 0.5) * step.
    """

    NAME: ClassVar = NamePattern(
        "upsampling",
        "{channels}_{height,width}to{output}_b{batch}_{mode:nearest_exact|nearest|bilinear|bicubic}"
        "{corners?_corners}[_by{factors}]",
        factors=Codec(
            r"[\d.e+-]+x[\d.e+-]+", lambda text: tuple(map(float, text.split("x"))), "{0[0]}x{0[1]}".format
        ),
    )

    output: tuple[int, int]
    mode: str = "nearest"
    corners: bool = False
    factors: tuple[float, float] = (0.0, 0.0)
    """How many times as high and as wide, where places follow these; 0: they follow the sizes."""
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
    def taps(self) -> int:
        """Pixels along each dimension that a result is made of."""
        return MODES[self.mode]

    @property
    def steps(self) -> tuple[float, float]:
        """Pixels of x from one of y to the next."""
        sizes = zip((self.height, self.width), self.output, self.factors, strict=True)
        down, along = (step_of(size, outputs, self.corners, factor) for size, outputs, factor in sizes)
        return down, along

    @property
    def flops(self) -> int:
        """Products and additions of the sums."""
        return 2 * self.output_elements * self.taps * self.taps

    @property
    def bytes(self) -> int:
        """Where the result is smaller, pixels that none is made of need not be read."""
        sizes = zip((self.height, self.width), self.output, strict=True)
        rows, columns = (min(size, self.taps * outputs) for size, outputs in sizes)
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A place between n pixels is off by up to n * 2^-24 of a pixel, and so are the weights, of which several are
        multiplied and added; copies are exact."""
        return 2.0**-24 * (max(self.height, self.width) + self.taps) if self.taps > 1 else 0.0


def step_of(size: int, outputs: int, corners: bool, factor: float) -> float:
    """Pixels of x from one of y to the next, as PyTorch computes them."""
    if corners:
        return (size - 1) / (outputs - 1) if outputs > 1 else 0.0
    return 1.0 / factor if factor else size / outputs


def fits(size: int, outputs: int, factor: float) -> bool:
    """Whether a factor, if there is one, makes about so many pixels of those: then its steps stay inside the image."""
    return factor == 0.0 or (math.isfinite(factor) and abs(size * factor - outputs) <= 1)


def _check(p: Upsample2dProblem) -> None:
    check_problem("upsample2d", p)
    require("upsample2d", "mode", p.mode, tuple(MODES))
    require_at_least(1, {"output": min(p.output)})
    if p.corners and p.taps == 1:
        raise UnsupportedError(f"mode {p.mode} with corners: only bilinear and bicubic take them")
    sizes = zip((p.height, p.width), p.output, p.factors, strict=True)
    if min(p.factors) < 0 or not all(fits(*size) for size in sizes):
        raise UnsupportedError(
            f"factors of {p.factors[0]} and {p.factors[1]}: they do not make {spell_pair(p.output)} pixels of "
            f"{spell_pair((p.height, p.width))}"
        )
    if max(p.height, p.width, *p.output) >= 2**24:
        raise UnsupportedError(f"{p.name}: upsample2d takes sizes of less than 2^24")
    check_pitches(p, x=p.channels, y=p.channels)
    apart = max(p.channels, p.x_pitch, p.y_pitch)
    require_32_bits("upsample2d", apart * max(p.pixels, p.output_height * p.output_width))
