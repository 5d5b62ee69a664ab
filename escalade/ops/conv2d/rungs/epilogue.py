"""Epilogue of a convolution on Hopper, where its results are stored, and the cost of pointwise expressions."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.device.recipe import Ints
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.expressions import Expression
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


SPECIAL_LANES = 16
"""Special-function results per clock and SM."""
SPECIAL = {
    "silu": 1.5,
    "sigmoid": 2,
    "exp": 1,
    "tanh": 2,
    "gelu": 1.5,
    "gelu_tanh": 1.5,
    "mish": 2,
    "log": 1,
    "elu": 1,
}
"""Special-function instructions per call, for the functions that networks use between layers."""
PLAIN = ("add", "sub", "mul", "neg", "relu", "maximum", "minimum")
"""Functions that compile to one instruction."""
CALL, SPECIAL_CALL = 4.0, 1.0
"""Instructions per call of any other function, plus those per special function in it."""


def activation_cost(text: str) -> tuple[float, float]:
    """Return instructions and special functions of an expression, estimated; an empty one counts as ReLU."""
    if not text:
        return 1.0, 0.0
    calls = [call.function for call in Expression.parse(text).calls]
    special = sum(SPECIAL.get(name, 0) for name in calls)
    plain = sum(name in PLAIN for name in calls)
    return plain + CALL * (len(calls) - plain) + SPECIAL_CALL * special, special
