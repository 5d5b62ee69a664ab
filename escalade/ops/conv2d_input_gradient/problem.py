"""The gradient of a convolution's input as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.gradient_problem import GradientProblem
from escalade.ops.conv2d.problem import Conv2dProblem

_MASK = "_mask"


@dataclass(frozen=True)
class Conv2dInputGradientProblem(GradientProblem[Conv2dProblem]):
    """dx of y = conv2d(x, weight), from `gradient`, which is that of y, and `weight`; the result is buffer `y`.

    With a mask, which is x as it came out of a ReLU, dx is zero where the mask is not positive: what the ReLU's own
    backward pass would do.

    It is a transposed convolution of `gradient`, too, and the convolution's epilogue is that of the result: a bias for
    each channel of x, and ReLU or another activation; or a residual, the gradient of x from elsewhere, which is added.
    """

    mask: bool = False

    def __post_init__(self) -> None:
        self.follow("conv2d_input_gradient", MULTIPLIED)
        f = self.forward
        if f.shortcut_channels or f.output or f.prologue or f.x_pitch or f.y_pitch:
            raise UnsupportedError(
                f"{f.name} has another input, or a result of another form; conv2d_input_gradient takes a bias and an "
                "activation, or a residual, at most"
            )
        if self.mask + self.has_epilogue + f.residual > 1:
            raise UnsupportedError(
                f"{self.name} has two of an epilogue, a mask and a residual; there is one of them at most"
            )

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> Conv2dInputGradientProblem:
        """The problem of a name such as `64to64_56_k3s1_b256_mask`: that of the convolution, then _mask for one."""
        forward = Conv2dProblem.parse(name.removesuffix(_MASK), dtype, layout)
        return Conv2dInputGradientProblem(forward, mask=name.endswith(_MASK))

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        return self.forward.name + (_MASK if self.mask else "")

    @property
    def has_epilogue(self) -> bool:
        return self.forward.bias or self.forward.relu or bool(self.forward.activation)

    @property
    def aux(self) -> str:
        """The image of dx's shape that comes besides, `mask` or `residual`, if there is one."""
        return "mask" if self.mask else "residual" if self.forward.residual else ""

    @property
    def elements(self) -> int:
        """Elements of dx."""
        return self.forward.input_elements

    @property
    def bytes(self) -> int:
        f = self.forward
        bias = f.channels if f.bias else 0
        return f.element_bytes * (
            f.output_elements + f.weight_elements + self.elements * (1 + bool(self.aux)) + bias
        )

    @property
    def depth(self) -> float:
        """The products in a sum, on average: a stride leaves a pixel only some of the taps."""
        f = self.forward
        return max(1.0, f.group_filters * f.taps / math.prod(f.stride))

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + self.depth / 6)
