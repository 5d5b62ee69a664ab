"""The gates of squeeze-and-excite as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.pitch import check_pitches, read_pitches, spell_pitches
from escalade.ops.expressions import Expression
from escalade.ops.shared.channels import SIZES, spell_sizes
from escalade.ops.shared.images import Images, check_problem, read_sizes, require_32_bits

LAYOUTS = ("nhwc",)
MOST_FEATURES = 24 * 1024
"""Channels and squeezed features together: in fp32 they lie in the shared memory that a block has on every card."""
_NAME = re.compile(
    SIZES + r"_s(?P<squeezed>\d+)(?P<bias>_bias)?(?P<gate_bias>_gatebias)?"
    r"\[(?P<hidden>[^\]]+)\]\[(?P<gate>[^\]]+)\]"
)  # fmt: skip


@dataclass(frozen=True)
class SqueezeExciteProblem(Images):
    """y = gate(gate_weight · hidden(weight · mean(x) + bias) + gate_bias): a factor for each channel of an image.

    The mean is over the pixels of an image. x is [batch][height][width][channels], weight [squeezed][channels],
    gate_weight [channels][squeezed], y [batch][channels], all of one dtype; sums, means and what lies between the
    layers are fp32. `hidden` and `gate` are expressions in `x`, which stands for each layer's own result.
    """

    squeezed: int
    bias: bool = True
    gate_bias: bool = True
    hidden: str = "relu(x)"
    gate: str = "sigmoid(x)"
    dtype: str = "fp32"
    layout: str = "nhwc"
    x_pitch: int = 0
    """Elements of x from pixel to pixel, if it is a part of a larger buffer; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("squeeze_excite", self, DTYPES, LAYOUTS)
        require_32_bits("squeeze_excite", max(self.channels, self.x_pitch) * self.pixels)
        require_at_least(1, {"squeezed": self.squeezed})
        if self.channels + self.squeezed > MOST_FEATURES:
            raise UnsupportedError(
                f"{self.channels} channels and {self.squeezed} squeezed features: squeeze_excite takes "
                f"{MOST_FEATURES} of both together at most"
            )
        for role in ("hidden", "gate"):
            text = getattr(self, role)
            expression = Expression.parse(text)
            if expression.inputs != ("x",) or len(expression.results) != 1:
                raise UnsupportedError(
                    f"{role} {text!r}: it is one result computed from x, such as sigmoid(x)"
                )
            object.__setattr__(self, role, expression.text)
        check_pitches(self, x=self.channels)

    @staticmethod
    def parse(name: str) -> SqueezeExciteProblem:
        """The problem of a name such as `96_56_b32_s4_bias_gatebias[silu(x)][sigmoid(x)]`."""
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "squeeze-and-excite; the form is 96_56_b32_s4_bias_gatebias[silu(x)][sigmoid(x)]: channels, image size "
            "(56 or 56x48), _b batch, _s squeezed features, then optionally _bias and _gatebias, the expressions in x "
            "behind each layer, and _xpitch128 where pixels lie apart",
        )
        return SqueezeExciteProblem(
            *read_sizes(found), int(found["squeezed"]), bool(found["bias"]), bool(found["gate_bias"]),
            found["hidden"], found["gate"], **apart,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        biases = "_bias" * self.bias + "_gatebias" * self.gate_bias
        applied = f"[{self.hidden}][{self.gate}]".replace(" ", "")
        return f"{spell_sizes(self)}_s{self.squeezed}{biases}{applied}{spell_pitches(self)}"

    @property
    def weight_elements(self) -> int:
        """Elements of one of the two weights."""
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
        """Three sums one behind another."""
        return 2.0**-24 * math.sqrt(3 + (self.pixels + self.channels + self.squeezed) / 6)
