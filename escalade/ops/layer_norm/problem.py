"""Layer normalisation as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.shared import activation
from escalade.ops.shared.rows import check_fields

EPSILON = 1e-5
_NAME = re.compile(
    r"(?P<features>\d+)_b(?P<batch>\d+)(_inner(?P<inner>\d+))?(?P<rms>_rms)?(?P<weight>_weight)?(?P<bias>_bias)?"
    r"(_eps(?P<epsilon>[0-9.e+-]+))?(?P<relu>_relu)?" + activation.IN_NAME
)


@dataclass(frozen=True)
class LayerNormProblem:
    """y[row] = activated((x[row] - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    x and y are [batch][features][inner], weight and bias [features], all of one dtype; sums are fp32. With
    `rms` the mean counts as 0: each row is divided by its root mean square.
    """

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

    @staticmethod
    def parse(name: str, dtype: str = "fp32") -> LayerNormProblem:
        """The problem of a name such as `96_b1568_weight_bias`."""
        found = match_name(
            _NAME,
            name,
            "layer normalisation; the form is 96_b1568_weight_bias: features, _b rows, _inner64 where so many lie "
            f"side by side, then optionally _rms, _weight, _bias, _eps and a number, _relu, or {activation.FORM}",
        )
        return LayerNormProblem(
            int(found["batch"]), int(found["features"]), bool(found["weight"]), bool(found["bias"]),
            bool(found["rms"]), float(found["epsilon"] or EPSILON), bool(found["relu"]), found["activation"] or "",
            dtype, inner=int(found["inner"] or 1),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        parts = {
            f"_inner{self.inner}": self.inner > 1, "_rms": self.rms, "_weight": self.weight, "_bias": self.bias,
            f"_eps{self.epsilon!r}": self.epsilon != EPSILON, "_relu": self.relu,
        }  # fmt: skip
        chosen = "".join(part for part, on in parts.items() if on)
        return f"{self.features}_b{self.batch}{chosen}{activation.spell(self)}"

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
