"""Batch normalisation as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.pitch import check_pitches, read_pitches, spell_pitches
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES, check_channelwise, spell_sizes
from escalade.ops.shared.images import (
    Images,
    read_sizes,
)

DEFAULT_EPSILON = 1e-5

_NAME = re.compile(
    SIZES
    + r"(_eps(?P<epsilon>\d+(\.\d+)?(e[-+]?\d+)?))?(_(?P<epilogue>res([+]relu)?|relu))?"
    + activation.IN_NAME
)


@dataclass(frozen=True)
class BatchNormProblem(Images):
    """y = relu((x - mean) / sqrt(variance + epsilon) * weight + bias + residual), residual and relu optional.

    weight, bias, mean and variance are fp32 and one a channel, whatever `dtype` x, residual and y are
    stored as. y may be x or the residual.
    """

    relu: bool = False
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float = DEFAULT_EPSILON
    activation: str = ""
    """What takes ReLU's place, if anything: an expression in `x`, such as `x * sigmoid(x)`."""
    x_pitch: int = 0
    residual_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_channelwise("batch_norm", self)
        activation.settle(self)
        if not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon of {self.epsilon}: it is a finite number of at least 0")
        check_pitches(self, **dict.fromkeys(("x", "residual", "y"), self.channels))

    @staticmethod
    def parse(name: str) -> BatchNormProblem:
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "batch normalisation; the form is 64_56_b32: channels, image size (56 or 56x48), "
            f"_b batch, then optional _eps0.001, _res+relu, {activation.FORM}, and _xpitch64 where pixels lie apart",
        )
        epilogue = (found["epilogue"] or "").split("+")
        epsilon = float(found["epsilon"]) if found["epsilon"] else DEFAULT_EPSILON
        return BatchNormProblem(
            *read_sizes(found), "relu" in epilogue, "res" in epilogue, epsilon=epsilon,
            activation=found["activation"] or "", **apart,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        epsilon = "" if self.epsilon == DEFAULT_EPSILON else f"_eps{float(self.epsilon)!r}"
        parts = [part for part, on in (("res", self.residual), ("relu", self.relu)) if on]
        epilogue = f"_{'+'.join(parts)}" if parts else ""
        return spell_sizes(self) + epsilon + epilogue + activation.spell(self) + spell_pitches(self)

    @property
    def flops(self) -> int:
        """x - mean, times the scale, plus the bias; then the epilogue."""
        return self.elements * (3 + self.residual + self.relu)

    @property
    def bytes(self) -> int:
        return self.elements * (2 + self.residual) * ELEMENT_BYTES[self.dtype] + 16 * self.channels

    @property
    def rounding(self) -> float:
        """Scale, difference, product and sums are rounded once each."""
        return 2.0**-24 * math.sqrt(5)
