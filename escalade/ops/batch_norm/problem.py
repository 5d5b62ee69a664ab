"""Batch normalisation as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES, check_channelwise
from escalade.ops.shared.images import (
    Images,
)

DEFAULT_EPSILON = 1e-5


@dataclass(frozen=True)
class BatchNormProblem(Images, Named):
    """y = relu((x - mean) / sqrt(variance + epsilon) * weight + bias + residual), residual and relu optional.

    weight, bias, mean and variance are fp32 and one a channel, whatever `dtype` x, residual and y are
    stored as. y may be x or the residual.
    """

    NAME: ClassVar = NamePattern(
        "batch normalization",
        SIZES + "[_eps{epsilon}]<_|+|{residual?res}|{relu?relu}>" + activation.IN_NAME,
    )

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
