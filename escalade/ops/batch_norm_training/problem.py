"""Batch normalisation in training as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.batch_norm.problem import DEFAULT_EPSILON, BatchNormProblem
from escalade.ops.batch_statistics.problem import (
    EPSILON_IN_NAME,
    MOMENTUM_IN_NAME,
    BatchStatisticsProblem,
    spell_numbers,
)
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES, spell_sizes
from escalade.ops.shared.images import Images, read_sizes

_NAME = re.compile(
    SIZES + EPSILON_IN_NAME + MOMENTUM_IN_NAME + r"(_(?P<epilogue>res([+]relu)?|relu))?" + activation.IN_NAME
)


@dataclass(frozen=True)
class BatchNormTrainingProblem(Images):
    """y = relu((x - mean) * rstd * weight + bias + residual), residual and relu optional, where mean and rstd, one over
    the root of variance + epsilon, are those of the batch, and further results.

    `weight`, `bias`, `mean` and `rstd` are fp32 and one a channel, whatever `dtype` x, residual and y are stored as.
    With `momentum` there are inputs `running_mean` and `running_variance`, and results `moved_mean` and
    `moved_variance`: those moved towards the batch's (the variance unbiased). y may be the residual, and what is moved
    may be where it was.
    """

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

    @staticmethod
    def parse(name: str) -> BatchNormTrainingProblem:
        found = match_name(
            _NAME,
            name,
            "batch normalisation in training; the form is 64_56_b32: channels, image size (56 or 56x48), _b batch, "
            f"then optional _eps0.001, _m0.1 (the momentum of running statistics), _res+relu, {activation.FORM}",
        )
        epilogue = (found["epilogue"] or "").split("+")
        return BatchNormTrainingProblem(
            *read_sizes(found), "relu" in epilogue, "res" in epilogue,
            epsilon=float(found["epsilon"] or DEFAULT_EPSILON),
            momentum=float(found["momentum"]) if found["momentum"] else None,
            activation=found["activation"] or "",
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        epsilon = None if self.epsilon == DEFAULT_EPSILON else self.epsilon
        parts = [part for part, on in (("res", self.residual), ("relu", self.relu)) if on]
        epilogue = f"_{'+'.join(parts)}" if parts else ""
        return spell_sizes(self) + spell_numbers(epsilon, self.momentum) + epilogue + activation.spell(self)

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
