"""The statistics of a batch as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.channels import SIZES, check_channelwise
from escalade.ops.shared.images import (
    Images,
)


@dataclass(frozen=True)
class BatchStatisticsProblem(Images, Named):
    """y[0] = mean and y[1] = variance (biased) of x over images and pixels, in fp32 for each channel.

    What training wants besides, each fp32 and one a channel: with `epsilon`, `mean` alone and `rstd`, one over the root
    of variance + epsilon, which a backward pass takes; with `momentum`, `moved_mean` and `moved_variance`: the inputs
    `running_mean` and `running_variance` moved towards the batch's (the variance unbiased), and they may be those.
    """

    NAME: ClassVar = NamePattern(
        "statistics",
        SIZES + "[_eps{epsilon}][_m{momentum}]",
    )

    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_statistics", self)
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon of {self.epsilon}: it is a finite number of at least 0")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise UnsupportedError(f"momentum of {self.momentum}: it is a share, from 0 to 1")

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

    @property
    def for_training(self) -> tuple[str, ...]:
        """The buffers of what training wants besides."""
        saved = ("mean", "rstd") if self.epsilon is not None else ()
        return saved + (("moved_mean", "moved_variance") if self.momentum is not None else ())

    @property
    def flops(self) -> int:
        """Operations of two passes: a sum; a difference, a product and a sum."""
        return 4 * self.elements

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype] + 8 * self.channels

    @property
    def rounding(self) -> float:
        """256 running sums side by side, each a random walk of its rounding errors."""
        return 2.0**-24 * math.sqrt(1 + self.count / 256 / 6)
