"""Weight gradient of a convolution: the problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.problem import GradientProblem
from escalade.ops.conv2d.problem import Conv2dProblem


@dataclass(frozen=True)
class Conv2dWeightGradientProblem(GradientProblem[Conv2dProblem]):
    """y[k][r][s][c] = sum over output pixels p of gradient[p][k] * x[window(p, r, s)][c], for a convolution `forward`.

    Inputs are x and `gradient` (dy). y is stored like the weights: [K][C/groups][R][S] in layout `nchw`,
    [K][R][S][C/groups] in `nhwc`. If the convolution has a bias, `bias_gradient` [K] is the sum of `gradient` over
    output pixels; that buffer is optional. Accumulators are fp32 in every dtype.
    """

    def __post_init__(self) -> None:
        f = self.forward
        if f.residual or f.relu or f.activation or f.shortcut_channels or f.output or f.prologue:
            raise UnsupportedError(
                f"{f.name}: conv2d_weight_gradient supports a bias, but no residual, shortcut, activation, prologue or "
                "other output type"
            )
        self.follow("conv2d_weight_gradient", MULTIPLIED)

    @staticmethod
    def parse(name: str) -> Conv2dWeightGradientProblem:
        """Parse a name such as `64to64_56_k3s1_b256_bias`, the convolution's."""
        return Conv2dWeightGradientProblem(Conv2dProblem.parse(name))

    @property
    def bias(self) -> bool:
        return self.forward.bias

    @property
    def part_elements(self) -> int:
        """Elements of the weight gradient, followed by the bias gradient."""
        return self.forward.weight_elements + (self.forward.filters if self.bias else 0)

    @property
    def bytes(self) -> int:
        f = self.forward
        return f.element_bytes * (f.touched_elements + f.output_elements + self.part_elements)

    @property
    def traffic(self) -> int:
        """Bytes used by estimates: the whole of x."""
        f = self.forward
        return self.bytes + f.element_bytes * (f.input_elements - f.touched_elements)

    @property
    def products(self) -> int:
        """Products per element of the result."""
        return self.forward.output_pixels

    @property
    def rounding(self) -> float:
        """Error of a running fp32 sum over the output pixels, as in `Conv2dProblem.rounding`."""
        return 2.0**-24 * math.sqrt(1 + self.forward.output_pixels / 6)
