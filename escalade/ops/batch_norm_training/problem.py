"""Batch normalisation in training as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.batch_norm.problem import DEFAULT_EPSILON, BatchNormProblem
from escalade.ops.batch_statistics.problem import (
    BatchStatisticsProblem,
)
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import Images


@dataclass(frozen=True)
class BatchNormTrainingProblem(Images, Named):
    """y = relu((x - mean) * rstd * weight + bias + residual), residual and relu optional, where mean and rstd, one over
    the root of variance + epsilon, are those of the batch, and further results.

    `weight`, `bias`, `mean` and `rstd` are fp32 and one a channel, whatever `dtype` x, residual and y are stored as.
    With `momentum` there are inputs `running_mean` and `running_variance`, and results `moved_mean` and
    `moved_variance`: those moved towards the batch's (the variance unbiased). y may be the residual, and what is moved
    may be where it was.
    """

    NAME: ClassVar = NamePattern(
        "batch normalization in training",
        SIZES + "[_eps{epsilon}][_m{momentum}]<_|+|{residual?res}|{relu?relu}>" + activation.IN_NAME,
    )

    relu: bool = False
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float = DEFAULT_EPSILON
    momentum: float | None = None
    activation: str = ""
    """What takes ReLU's place, if anything: an expression in `x`, such as `x * sigmoid(x)`."""

    def __post_init__(self) -> None:
        activation.settle(self)
        if self.count < 2:
            raise UnsupportedError(
                f"{self.batch} images of {self.pixels} pixels: training takes more than one value a channel, or it has "
                "no variance"
            )
        _ = self.statistics, self.normalisation  # both check what is theirs

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

    @cached_property
    def statistics(self) -> BatchStatisticsProblem:
        """The first pass."""
        return BatchStatisticsProblem(
            self.batch,
            self.channels,
            self.height,
            self.width,
            self.dtype,
            self.layout,
            self.epsilon,
            self.momentum,
        )

    @cached_property
    def normalisation(self) -> BatchNormProblem:
        """The second pass, which is all that is left where the statistics come from elsewhere, as from a convolution
        that has summed up its results."""
        return BatchNormProblem(
            self.batch, self.channels, self.height, self.width, self.relu, self.residual, self.dtype, self.layout,
            self.epsilon, self.activation,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        return self.statistics.flops + self.normalisation.flops

    @property
    def bytes(self) -> int:
        """x and the residual read once, and y written."""
        return self._bytes(2 + self.residual)

    @property
    def traffic(self) -> int:
        """What two passes move: both read x."""
        return self._bytes(3 + self.residual)

    def _bytes(self, passes: int) -> int:
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + 24 * self.channels

    @property
    def rounding(self) -> float:
        """The roundings of both passes, one after the other."""
        return math.hypot(self.statistics.rounding, self.normalisation.rounding)
