"""Base class of the rungs of conv2d_input_gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.base.rung import C
from escalade.ops.conv2d.rungs.rung import ConvolutionRung
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem


@dataclass(frozen=True)
class InputGradientRung(ConvolutionRung[Conv2dInputGradientProblem, C]):
    supports_norm: ClassVar[bool] = False
    """True if the kernel computes the sums for the gradients of a normalization."""
    supports_aux: ClassVar[bool] = True
    """True if the kernel applies a mask or adds a residual."""

    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if problem.norm and not self.supports_norm:
            return f"{self.name} computes no sums for a normalization; persistent does"
        if problem.aux and not self.supports_aux:
            return f"{self.name} does not support a {problem.aux}"
        return self.unsupported_form(problem.forward) or self.limits(problem)
