"""Group normalisation as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import LAYOUTS, Images, check_problem, require_32_bits

EPSILON = 1e-5


@dataclass(frozen=True)
class GroupNormProblem(Images, Named):
    """y = activated((x - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    Mean and variance are those of an image's group of channels, over all of its pixels; with as many groups as channels
    that is instance normalisation. weight and bias are one a channel, all of one dtype; sums are fp32. y may be x.
    """

    NAME: ClassVar = NamePattern(
        "group normalization",
        SIZES + "_g{groups}{weight?_weight}{bias?_bias}[_eps{epsilon}]{relu?_relu}" + activation.IN_NAME,
    )

    groups: int
    weight: bool = True
    bias: bool = True
    epsilon: float = EPSILON
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "nhwc"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("group_norm", self, DTYPES, LAYOUTS)
        require_32_bits("group_norm", max(self.channels, self.x_pitch, self.y_pitch) * self.pixels)
        if self.groups < 1 or self.channels % self.groups:
            raise UnsupportedError(
                f"{self.groups} groups of {self.channels} channels: groups are of one size, so their number divides "
                "that of the channels"
            )
        if self.batch * self.groups >= 2**30:
            raise UnsupportedError(
                f"{self.batch} images of {self.groups} groups: group_norm takes fewer than 2^30 groups; split the batch"
            )
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"an epsilon of {self.epsilon}: it is a number of at least 0")
        activation.settle(self)
        check_pitches(self, x=self.channels, y=self.channels)

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def row(self) -> int:
        """Elements of a group of one image, which in NCHW lie together."""
        return self.group_channels * self.pixels

    @property
    def flops(self) -> int:
        """A sum, a difference, a square and its sum, and a product an element; one more each for weight and bias."""
        return (5 + self.weight + self.bias) * self.elements

    @property
    def bytes(self) -> int:
        constants = (self.weight + self.bias) * self.channels
        return (2 * self.elements + constants) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Two sums of a group, a root and a quotient."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.row / 6))
