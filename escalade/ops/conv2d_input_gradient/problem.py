"""Input gradient of a convolution: the problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.problem import GradientProblem
from escalade.ops.batch_norm_backward import MASKS, BatchNormBackwardProblem
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared.activation import vectors_of

_MASK = "_mask"
_NORM = re.compile(rf"_norm({'|'.join(MASKS)})$")


@dataclass(frozen=True)
class Conv2dInputGradientProblem(GradientProblem[Conv2dProblem]):
    """dx of y = conv2d(x, weight), computed from `gradient` (dy) and `weight`; the result is buffer `y`.

    With a mask, the output of a ReLU that produced x, dx is zero where the mask is not positive: the ReLU's own
    backward pass.

    It is also a transposed convolution of `gradient`. The forward problem's epilogue then applies to the result: a bias
    per channel of x and an activation, or a residual (another gradient of x) to add.

    With `norm`, x is the result of a batch normalization in training with a ReLU or without, and `norm` tells how its
    mask is found, as in `BatchNormBackwardProblem`. dx is masked, and further results are `weight_gradient` and
    `bias_gradient`, those of the normalization. Its own buffers are `norm_x`, `norm_output`, `norm_mean`, `norm_rstd`,
    `norm_weight` and `norm_bias`.
    """

    mask: bool = False
    norm: str = ""

    def __post_init__(self) -> None:
        self.follow("conv2d_input_gradient", MULTIPLIED)
        f = self.forward
        if (
            f.shortcut_channels
            or f.output
            or f.prologue
            or f.x_pitch
            or f.y_pitch
            or vectors_of(f.activation)
        ):
            raise UnsupportedError(
                f"{f.name}: conv2d_input_gradient does not support shortcuts, prologues, pitches, other output "
                "types or vectors in its activation"
            )
        if self.norm and (self.norm not in MASKS or self.mask or self.has_epilogue):
            raise UnsupportedError(
                f"{self.name}: norm is one of {', '.join(MASKS)}, without another mask or an epilogue"
            )
        if self.mask + self.has_epilogue + f.residual > 1:
            raise UnsupportedError(
                f"{self.name}: conv2d_input_gradient supports one of an epilogue, a mask and a residual"
            )

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> Conv2dInputGradientProblem:
        """Parse a name such as `64to64_56_k3s1_b256_mask`: the convolution's, then _mask for a mask, or _normx."""
        found = _NORM.search(name)
        name = _NORM.sub("", name)
        forward = Conv2dProblem.parse(name.removesuffix(_MASK), dtype, layout)
        return Conv2dInputGradientProblem(forward, mask=name.endswith(_MASK), norm=found[1] if found else "")

    @property
    def name(self) -> str:
        return self.forward.name + (_MASK if self.mask else "") + (f"_norm{self.norm}" if self.norm else "")

    @property
    def normalization(self) -> BatchNormBackwardProblem | None:
        """The gradients of the normalization whose result x is, if any."""
        f = self.forward
        stored = "fp32" if f.dtype == "tf32" else f.dtype
        if not self.norm:
            return None
        return BatchNormBackwardProblem(
            f.images, f.channels, f.height, f.width, self.norm, False, stored, f.layout
        )

    @property
    def has_epilogue(self) -> bool:
        return self.forward.bias or self.forward.relu or bool(self.forward.activation)

    @property
    def aux(self) -> str:
        """Name of the auxiliary tensor of dx's shape: `mask`, `residual` or empty."""
        return "mask" if self.mask else "residual" if self.forward.residual else ""

    @property
    def elements(self) -> int:
        """Elements of dx."""
        return self.forward.input_elements

    @property
    def bytes(self) -> int:
        f = self.forward
        bias = f.channels if f.bias else 0
        read = bool(self.aux) + bool(self.norm) + (self.norm == "output")
        return f.element_bytes * (f.output_elements + f.weight_elements + self.elements * (1 + read) + bias)

    @property
    def depth(self) -> float:
        """Mean products per element: with a stride, a pixel meets only some of the taps."""
        f = self.forward
        return max(1.0, f.group_filters * f.taps / math.prod((f.frame_stride, *f.stride)))

    @property
    def products(self) -> int:
        return round(self.elements * self.depth)

    @property
    def rounding(self) -> float:
        """Error of a running fp32 sum, as in `Conv2dProblem.rounding`."""
        return 2.0**-24 * math.sqrt(1 + self.depth / 6)
