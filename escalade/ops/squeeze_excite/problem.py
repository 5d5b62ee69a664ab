"""Gates of squeeze-and-excite: the problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.expressions import Expression
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import Images, check_problem, require_32_bits

LAYOUTS = ("nhwc",)
MOST_FEATURES = 24 * 1024
"""Largest sum of channels and squeezed features: in fp32 they fit into the shared memory of a CTA on every card."""


@dataclass(frozen=True)
class SqueezeExciteProblem(Images, Named):
    """y = gate(gate_weight · hidden(weight · mean(x) + bias) + gate_bias): one factor per channel of an image.

    The mean is over the pixels of an image. x is [batch][height][width][channels], weight [squeezed][channels],
    gate_weight [channels][squeezed], y [batch][channels], all of one dtype; sums, means and intermediate values are
    fp32. `hidden` and `gate` are expressions in `x`, the layer's own result.
    """

    NAME: ClassVar = NamePattern(
        "squeeze-and-excite",
        SIZES + r"_s{squeezed}{bias?_bias}{gate_bias?_gatebias}\[{hidden:text}\]\[{gate:text}\]",
    )

    squeezed: int
    bias: bool = True
    gate_bias: bool = True
    hidden: str = "relu(x)"
    gate: str = "sigmoid(x)"
    dtype: str = "fp32"
    layout: str = "nhwc"
    x_pitch: int = 0
    """Elements per pixel step of x, if it is part of a larger buffer; 0 if dense."""

    def __post_init__(self) -> None:
        check_problem("squeeze_excite", self, DTYPES, LAYOUTS)
        require_32_bits("squeeze_excite", max(self.channels, self.x_pitch) * self.pixels)
        require_at_least(1, {"squeezed": self.squeezed})
        if self.channels + self.squeezed > MOST_FEATURES:
            raise UnsupportedError(
                f"{self.channels} channels and {self.squeezed} squeezed features: squeeze_excite takes up to "
                f"{MOST_FEATURES} in all"
            )
        for role in ("hidden", "gate"):
            text = getattr(self, role)
            expression = Expression.parse(text)
            if expression.inputs != ("x",) or len(expression.results) != 1:
                raise UnsupportedError(
                    f"{role} {text!r}: it must be a single expression in x, such as sigmoid(x)"
                )
            object.__setattr__(self, role, expression.text)
        check_pitches(self, x=self.channels)

    @property
    def weight_elements(self) -> int:
        """Elements of each weight."""
        return self.channels * self.squeezed

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels

    @property
    def flops(self) -> int:
        return self.elements + 4 * self.batch * self.weight_elements

    @property
    def bytes(self) -> int:
        constants = 2 * self.weight_elements + self.bias * self.squeezed + self.gate_bias * self.channels
        return (self.elements + constants + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Error of three consecutive sums."""
        return 2.0**-24 * math.sqrt(3 + (self.pixels + self.channels + self.squeezed) / 6)
