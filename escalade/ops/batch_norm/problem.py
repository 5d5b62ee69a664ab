"""Batch normalisation and the statistics of a batch as problems."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.shared.images import (
    Images,
    check_problem,
    pair_pattern,
    read_sizes,
    require_32_bits,
    spell_pair,
)

DEFAULT_EPSILON = 1e-5

_IMAGES = rf"(?P<channels>\d+)_{pair_pattern('size')}_b(?P<batch>\d+)"
_STATISTICS_NAME = re.compile(_IMAGES)
_NAME = re.compile(
    _IMAGES + r"(_eps(?P<epsilon>\d+(\.\d+)?(e[-+]?\d+)?))?(_(?P<epilogue>res([+]relu)?|relu))?"
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

    def __post_init__(self) -> None:
        _check("batch_norm", self)
        if not 0 < self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon of {self.epsilon}: it is a positive finite number")

    @staticmethod
    def parse(name: str) -> BatchNormProblem:
        found = match_name(
            _NAME,
            name,
            "batch normalisation; the form is 64_56_b32: channels, image size (56 or 56x48), "
            "_b batch, then optional _eps0.001 and _res+relu",
        )
        epilogue = (found["epilogue"] or "").split("+")
        epsilon = float(found["epsilon"]) if found["epsilon"] else DEFAULT_EPSILON
        return BatchNormProblem(*read_sizes(found), "relu" in epilogue, "res" in epilogue, epsilon=epsilon)

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        epsilon = "" if self.epsilon == DEFAULT_EPSILON else f"_eps{float(self.epsilon)!r}"
        parts = [part for part, on in (("res", self.residual), ("relu", self.relu)) if on]
        return _spell(self) + epsilon + (f"_{'+'.join(parts)}" if parts else "")

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


@dataclass(frozen=True)
class BatchStatisticsProblem(Images):
    """y[0] = mean and y[1] = variance (biased) of x over images and pixels, in fp32 for each channel."""

    dtype: str = "fp32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        _check("batch_statistics", self)

    @staticmethod
    def parse(name: str) -> BatchStatisticsProblem:
        found = match_name(
            _STATISTICS_NAME,
            name,
            "statistics; the form is 64_56_b32: channels, image size (56 or 56x48), _b batch",
        )
        return BatchStatisticsProblem(*read_sizes(found))

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        return _spell(self)

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


def _spell(p: BatchNormProblem | BatchStatisticsProblem) -> str:
    return f"{p.channels}_{spell_pair((p.height, p.width))}_b{p.batch}"


def _check(operation: str, p: BatchNormProblem | BatchStatisticsProblem) -> None:
    check_problem(operation, p)
    require_32_bits(operation, p.channels * p.pixels)
