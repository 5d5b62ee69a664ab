"""Base classes of the rungs of conv2d_weight_gradient."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import Recipe
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.rung import ConvolutionRung
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

BOX = 64
"""Filters or channels per row of shared memory: 128 bytes, the swizzle span."""
STEP_PIXELS = 16
"""K of a wgmma in pixels."""
PRODUCT_RATE = 2048
"""Multiply-adds per cycle and SM."""
STAGE_CYCLES = 60.0
"""Cycles to wait for a stage and to release it."""
MULTIPLE = 8
"""Channels and filters are multiples of 16 bytes for TMA."""


@dataclass(frozen=True)
class WeightGradientRung(ConvolutionRung[Conv2dWeightGradientProblem, C]):
    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        return self.unsupported_form(problem.forward) or self.limits(problem)


@dataclass(frozen=True)
class HopperRung(WeightGradientRung[C]):
    """Rung with TMA and wgmma."""

    dtypes: tuple[str, ...] = ("fp16", "bf16")
    layouts: tuple[str, ...] = ("nhwc",)
    architectures = WITH_WGMMA

    def narrow(self, f: Conv2dProblem) -> str | None:
        """Return why TMA does not support the channels or filters."""
        if f.channels % MULTIPLE or f.filters % MULTIPLE:
            return f"{self.name} takes multiples of {MULTIPLE} channels and filters, not {f.channels} and {f.filters}"
        return None

    def in_parts(self, problem: Conv2dWeightGradientProblem, config: C) -> Recipe:
        """Return the recipe with partial sums in the workspace even if there is one part."""
        return self.recipe(problem, config)
