"""Weight gradients on CUDA cores, one thread per element; supports every problem."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts

_MOST_PARTS = 256
_LEAST_PIXELS = 16
"""Least pixels per part."""


@dataclass(frozen=True)
class Direct(Rung[Conv2dWeightGradientProblem, ThreadsConfig]):
    last_resort = True

    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

    def recipe(self, problem: Conv2dWeightGradientProblem, config: ThreadsConfig) -> Recipe:
        pixels = problem.forward.output_pixels
        # Enough parts to fill the card, but not with a few pixels each.
        wanted = ceil_div(self.card.busy_blocks * 256, problem.part_elements)
        part_pixels = ceil_div(pixels, max(1, min(_MOST_PARTS, wanted, ceil_div(pixels, _LEAST_PIXELS))))
        count = ceil_div(pixels, part_pixels)
        product = KernelCall(
            Program.of("conv2d_weight_gradient/direct.cu", problem=problem),
            (blocks(problem.part_elements, config.threads), count, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"),
                Buffer("gradient"),
                Buffer(parts.PARTS),
                arguments.shape(problem.forward),
                Int64(part_pixels),
            ),
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# Prediction for 64to64_56_k3s1 at batch 256, 30 G products.
DIRECT = Direct(
    "direct",
    "one thread per weight, its sum in a register, everything read from global memory; partial sums over pixels are "
    "added up in a fixed order",
    below="shared_sums",
    # Two loads per product, 32 lanes per cycle and SM: 8 ms instead of 47.
    predicted_gain=5.9,
)
