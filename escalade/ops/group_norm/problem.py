"""Group normalisation as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.pitch import check_pitches, read_pitches, spell_pitches
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES, spell_sizes
from escalade.ops.shared.images import LAYOUTS, Images, check_problem, read_sizes, require_32_bits

EPSILON = 1e-5
_NAME = re.compile(
    SIZES + r"_g(?P<groups>\d+)(?P<weight>_weight)?(?P<bias>_bias)?(_eps(?P<epsilon>[0-9.e+-]+))?(?P<relu>_relu)?"
    + activation.IN_NAME
)  # fmt: skip


@dataclass(frozen=True)
class GroupNormProblem(Images):
    """y = activated((x - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    Mean and variance are those of an image's group of channels, over all of its pixels; with as many groups as channels
    that is instance normalisation. weight and bias are one a channel, all of one dtype; sums are fp32. y may be x.
    """

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

    @staticmethod
    def parse(name: str) -> GroupNormProblem:
        """The problem of a name such as `256_56_b32_g32_weight_bias`, in NHWC."""
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "group normalisation; the form is 256_56_b32_g32_weight_bias: channels, image size (56 or 56x48), _b "
            f"batch, _g groups, then optionally _weight, _bias, _eps and a number, _relu, or {activation.FORM}, and "
            "_xpitch64 where pixels lie apart",
        )
        return GroupNormProblem(
            *read_sizes(found), int(found["groups"]), bool(found["weight"]), bool(found["bias"]),
            float(found["epsilon"] or EPSILON), bool(found["relu"]), found["activation"] or "",
            **apart,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        parts = {
            "_weight": self.weight, "_bias": self.bias, f"_eps{self.epsilon!r}": self.epsilon != EPSILON,
            "_relu": self.relu,
        }  # fmt: skip
        chosen = "".join(part for part, on in parts.items() if on)
        return f"{spell_sizes(self)}_g{self.groups}{chosen}{activation.spell(self)}{spell_pitches(self)}"

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
