"""The statistics of a batch as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.ops.base.checks import match_name, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.shared.channels import SIZES, check_channelwise, spell_sizes
from escalade.ops.shared.images import (
    Images,
    read_sizes,
)

_NAME = re.compile(SIZES)


@dataclass(frozen=True)
class BatchStatisticsProblem(Images):
    """y[0] = mean and y[1] = variance (biased) of x over images and pixels, in fp32 for each channel."""

    dtype: str = "fp32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_statistics", self)

    @staticmethod
    def parse(name: str) -> BatchStatisticsProblem:
        found = match_name(
            _NAME,
            name,
            "statistics; the form is 64_56_b32: channels, image size (56 or 56x48), _b batch",
        )
        return BatchStatisticsProblem(*read_sizes(found))

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        return spell_sizes(self)

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

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
