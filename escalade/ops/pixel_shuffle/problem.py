"""Channels as pixels, and pixels as channels, as a problem."""

from __future__ import annotations

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
class PixelShuffleProblem(Images, Named):
    """y[c, h * factor + i, w * factor + j] = x[(c * factor + i) * factor + j, h, w]; with `down` x is made of y so."""

    NAME: ClassVar = NamePattern(
        "pixel shuffle",
        "{channels}_{height,width}_{down?down:up}{factor}_b{batch}",
    )

    factor: int
    down: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("pixel_shuffle", self)
        require_at_least(1, {"factor": self.factor})
        ways = (
            ((self.height, "height"), (self.width, "width")) if self.down else ((self.channels, "channels"),)
        )
        parts = self.factor if self.down else self.factor**2
        for size, what in ways:
            if size % parts:
                raise UnsupportedError(
                    f"{what} of {size}: a factor of {self.factor} takes multiples of {parts}"
                )
        check_pitches(self, x=self.channels, y=self.output_channels)
        apart = max(self.channels, self.x_pitch) * self.pixels
        require_32_bits("pixel_shuffle", max(apart, self.y_pitch * self.output_height * self.output_width))

    @property
    def output_channels(self) -> int:
        return self.channels * self.factor**2 if self.down else self.channels // self.factor**2

    @property
    def output_height(self) -> int:
        return self.height // self.factor if self.down else self.height * self.factor

    @property
    def output_width(self) -> int:
        return self.width // self.factor if self.down else self.width * self.factor

    @property
    def output_elements(self) -> int:
        return self.elements

    @property
    def small(self) -> tuple[int, int]:
        """Height and width of the smaller of the two images."""
        return (self.output_height, self.output_width) if self.down else (self.height, self.width)

    @property
    def few_channels(self) -> int:
        """Channels of the larger of the two images."""
        return self.channels if self.down else self.output_channels

    @property
    def flops(self) -> int:
        """Nothing is computed: an element is moved."""
        return self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: every element is one of the inputs."""
        return 0.0
