"""Fully connected layer: the problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared import activation
from escalade.ops.shared.rows import check_fields


@dataclass(frozen=True)
class LinearProblem(Named):
    """y = relu(x @ weight.T + bias); bias and relu are optional.

    x is [batch][in_features], weight [out_features][in_features], y [batch][out_features]. `dtype` is their storage
    type; `tf32` means fp32 storage with TF32 products. Accumulators are always fp32.

    With `pixels`, x is [batch][pixels][in_features], an NHWC image, and the layer's input is the mean over its pixels,
    rounded to `dtype`.
    """

    NAME: ClassVar = NamePattern(
        "fully connected layer",
        "{in_features}to{out_features}[_mean{pixels}]_b{batch}<_|+|{bias?bias}|{relu?relu}>"
        + activation.IN_NAME,
    )

    batch: int
    in_features: int
    out_features: int
    bias: bool = False
    relu: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    pixels: int = 1
    activation: str = ""
    """Expression in `x` that replaces ReLU, such as `x * sigmoid(x)`."""

    def __post_init__(self) -> None:
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "pixels": self.pixels}
        check_fields("linear", self, MULTIPLIED, sizes)
        activation.normalize(self)
        if self.output_elements >= 2**38:
            raise UnsupportedError(
                f"{self.output_elements} outputs: linear takes fewer than 2^38; split the rows"
            )

    @property
    def input_elements(self) -> int:
        return self.batch * self.pixels * self.in_features

    @property
    def output_elements(self) -> int:
        return self.batch * self.out_features

    @property
    def flops(self) -> int:
        additions = self.input_elements if self.pixels > 1 else 0
        return 2 * self.output_elements * self.in_features + additions

    @property
    def bytes(self) -> int:
        inputs = self.input_elements + self.out_features * self.in_features
        return ELEMENT_BYTES[self.dtype] * (
            inputs + self.output_elements + (self.out_features if self.bias else 0)
        )

    @property
    def rounding(self) -> float:
        """Error of a running fp32 sum, as in `Conv2dProblem.rounding`."""
        return 2.0**-24 * math.sqrt(1 + (self.in_features + self.pixels - 1) / 6)
