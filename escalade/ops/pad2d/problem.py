"""An image with more around it, or less, as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared.images import (
    Images,
    check_problem,
    require_32_bits,
)

MODES = ("constant", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Pad2dProblem(Images, Named):
    """y[oh, ow] = x[oh - top, ow - left], and beyond the image what the mode says.

    That is a constant, the image mirrored at its outermost pixels, its outermost pixels again, or the image from its
    other side. A negative pad leaves pixels out.
    """

    NAME: ClassVar = NamePattern(
        "padding",
        "{channels}_{height,width}_pad{pads}_b{batch}_{mode:constant|reflect|replicate|circular}[({value})]",
        value=Codec("[^)]+", float),
    )

    pads: tuple[int, int, int, int]
    """Rows above and below, columns to the left and to the right."""
    mode: str = "constant"
    value: float = 0.0
    """The constant."""
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("pad2d", self)
        require("pad2d", "mode", self.mode, MODES)
        sentence = refusal((self.height, self.width), self.pads, self.mode)
        if sentence:
            raise UnsupportedError(sentence)
        if math.isnan(self.value) or (self.value and self.mode != "constant"):
            raise UnsupportedError(
                f"value of {self.value} in mode {self.mode}: a constant is a number, others have none"
            )
        check_pitches(self, x=self.channels, y=self.channels)
        apart = max(self.channels, self.x_pitch, self.y_pitch)
        require_32_bits("pad2d", apart * max(self.pixels, self.output_height * self.output_width))

    @property
    def output_height(self) -> int:
        return self.height + self.pads[0] + self.pads[1]

    @property
    def output_width(self) -> int:
        return self.width + self.pads[2] + self.pads[3]

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    @property
    def flops(self) -> int:
        """Nothing is computed: an element is moved."""
        return self.output_elements

    @property
    def bytes(self) -> int:
        rows, columns = self.height + _cut(self.pads[:2]), self.width + _cut(self.pads[2:])
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: every element is one of the inputs."""
        return 0.0


def _cut(pads: tuple[int, ...]) -> int:
    return sum(min(pad, 0) for pad in pads)


def refusal(size: tuple[int, int], pads: tuple[int, int, int, int], mode: str) -> str | None:
    """Why there is no such image, in a sentence; None if there is."""
    most = {"reflect": 1, "circular": 0}
    for length, before, after in ((size[0], *pads[:2]), (size[1], *pads[2:])):
        if length + _cut((before, after)) < 1 or length + before + after < 1:
            return f"pads of {before} and {after} leave nothing of {length} pixels"
        if mode != "constant" and min(before, after) < 0:
            return f"pads of {before} and {after} in mode {mode}: only a constant takes negative ones"
        if mode in most and max(before, after) > length - most[mode]:
            return f"pads of {before} and {after} in mode {mode}: there are {length} pixels, fewer than that takes"
    return None
