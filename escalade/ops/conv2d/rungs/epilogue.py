"""What becomes of the sums of a convolution on Hopper, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Type
from escalade.device.recipe import Ints
from escalade.ops.base.dtypes import element
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation

UNPLACED = Ints((1, 1, 0, 0, 0, 0))
"""`Placement` of kernels/conv2d/placement.cuh where y is a whole image. Otherwise it is a part of a larger one:
the steps between its rows and columns there, the first of each, and the whole's height and width."""
CLASS_INTS = 8
ONE_CLASS = Ints((1, 1, *(0,) * CLASS_INTS))
"""`PixelClasses` of kernels/conv2d/pixel_classes.cuh where all pixels meet the same taps: nothing is asked of it.
Otherwise two steps, and `CLASS_INTS` numbers for each class."""


def class_count(classes: Ints) -> int:
    """The number of classes that such a struct has."""
    return (len(classes.values) - 2) // CLASS_INTS


@dataclass(frozen=True)
class Epilogue:
    """What a convolution does with its sums: bias, residual, activation or mask, and the type of the result."""

    output: str
    """The dtype of y."""
    bias: bool = False
    residual: bool = False
    relu: bool = False
    activation: str = ""
    mask: bool = False
    """The buffer in the residual's place lets through where it is positive: the gradient of a ReLU."""

    @staticmethod
    def of(problem: Conv2dProblem) -> Epilogue:
        p = problem
        return Epilogue(p.output or p.dtype, p.bias, p.residual, p.relu, p.activation)

    @property
    def companion(self) -> bool:
        """Whether an image of y's shape comes besides."""
        return self.residual or self.mask

    @property
    def flags(self) -> dict[str, Constant]:
        return {
            "HAS_BIAS": self.bias,
            "HAS_RESIDUAL": self.residual,
            **activation.constants(self.relu, self.activation, self.output),
            "HAS_MASK": self.mask,
        }

    def constants(self, dtype: str) -> dict[str, Constant]:
        """The constants of a kernel whose products are of that type."""
        output = element(self.output)
        return {"Output": output, "Bias": Type("float") if dtype == "fp8" else output, **self.flags}
