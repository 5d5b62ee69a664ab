"""Layer normalisation as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared import activation
from escalade.ops.shared.rows import check_fields

EPSILON = 1e-5


@dataclass(frozen=True)
class LayerNormProblem(Named):
    """y[row] = activated((x[row] - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    x and y are [batch][features][inner], weight and bias [features], all of one dtype; sums are fp32. With
    `rms` the mean counts as 0: each row is divided by its root mean square.
    """

    NAME: ClassVar = NamePattern(
        "layer normalization",
        "{features}_b{batch}[_inner{inner}]{rms?_rms}{weight?_weight}{bias?_bias}[_eps{epsilon}]{relu?_relu}"
        + activation.IN_NAME,
    )

    batch: int
    features: int
    weight: bool = True
    bias: bool = True
    rms: bool = False
    epsilon: float = EPSILON
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Rows of each of the batch, which lie side by side, and elements from one of a row to its next: the pixels of an
    image, for its channels in NCHW."""

    def __post_init__(self) -> None:
        check_fields("layer_norm", self, DTYPES, {"features": self.features, "inner": self.inner})
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"an epsilon of {self.epsilon}: it is a number of at least 0")
        activation.settle(self)

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.features

    @property
    def flops(self) -> int:
        """A sum, a difference, a square and its sum, and a product an element; one more each for weight and bias."""
        return (5 + self.weight + self.bias) * self.elements

    @property
    def bytes(self) -> int:
        constants = (self.weight + self.bias) * self.features
        return (2 * self.elements + constants) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Two sums of a row, a root and a quotient."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.features / 6))
