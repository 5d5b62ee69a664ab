"""Epilogue of a convolution on Hopper, and where its results are stored."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.device.recipe import Ints
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation

UNPLACED = Ints((1, 1, 0, 0, 0, 0))
"""`Placement` (kernels/conv2d/placement.cuh) of a whole image. In a larger image: row and column step, first row and
column, height and width of that image."""
PHASE_INTS = 8
ONE_PHASE = Ints((1, 1, *(0,) * PHASE_INTS))
"""`PixelClasses` (kernels/conv2d/pixel_classes.cuh) of a single class, whose taps are the same for all pixels.
Otherwise two steps, and `PHASE_INTS` numbers per class."""


def phase_count(phases: Ints) -> int:
    return (len(phases.values) - 2) // PHASE_INTS


@dataclass(frozen=True)
class Epilogue:
    """Epilogue of the accumulators: bias, residual, activation or mask, and the type of the result."""

    output: str
    bias: bool = False
    residual: bool = False
    relu: bool = False
    activation: str = ""
    mask: bool = False
    """True if the residual's buffer is a ReLU mask: y passes where it is positive."""

    @staticmethod
    def of(problem: Conv2dProblem) -> Epilogue:
        p = problem
        return Epilogue(p.output or p.dtype, p.bias, p.residual, p.relu, p.activation)

    @property
    def aux(self) -> bool:
        """True if an auxiliary tensor of y's shape is read."""
        return self.residual or self.mask

    @property
    def activation_constants(self) -> dict[str, Constant]:
        return activation.constants(self.relu, self.activation, self.output)
