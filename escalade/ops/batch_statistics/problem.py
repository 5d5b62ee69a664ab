"""The statistics of a batch as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.shared.channels import SIZES, check_channelwise, spell_sizes
from escalade.ops.shared.images import (
    Images,
    read_sizes,
)

EPSILON_IN_NAME = r"(_eps(?P<epsilon>\d+(\.\d+)?(e[-+]?\d+)?))?"
MOMENTUM_IN_NAME = r"(_m(?P<momentum>\d+(\.\d+)?(e[-+]?\d+)?))?"
_NAME = re.compile(SIZES + EPSILON_IN_NAME + MOMENTUM_IN_NAME)


def spell_numbers(epsilon: float | None, momentum: float | None) -> str:
    """`_eps0.001_m0.1`, what the name of a problem has of these; nothing where one is not there."""
    spelled = "" if epsilon is None else f"_eps{float(epsilon)!r}"
    return spelled if momentum is None else f"{spelled}_m{float(momentum)!r}"


@dataclass(frozen=True)
class BatchStatisticsProblem(Images):
    """y[0] = mean and y[1] = variance (biased) of x over images and pixels, in fp32 for each channel.

    What training wants besides, each fp32 and one a channel: with `epsilon`, `mean` alone and `rstd`, one over the root
    of variance + epsilon, which a backward pass takes; with `momentum`, `moved_mean` and `moved_variance`: the inputs
    `running_mean` and `running_variance` moved towards the batch's (the variance unbiased), and they may be those.
    """

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

    @staticmethod
    def parse(name: str) -> BatchStatisticsProblem:
        found = match_name(
            _NAME,
            name,
            "statistics; the form is 64_56_b32: channels, image size (56 or 56x48), _b batch, then for training "
            "_eps1e-05 and _m0.1, the momentum of running statistics",
        )
        return BatchStatisticsProblem(
            *read_sizes(found),
            epsilon=float(found["epsilon"]) if found["epsilon"] else None,
            momentum=float(found["momentum"]) if found["momentum"] else None,
        )

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        return spell_sizes(self) + spell_numbers(self.epsilon, self.momentum)

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
