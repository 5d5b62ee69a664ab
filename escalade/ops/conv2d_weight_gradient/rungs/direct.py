"""Weight gradients on CUDA cores: atomics in global and in shared memory, and one thread per weight."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import ThreadsConfig
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import WeightGradientRung

_SUMS = "sums"
_FP32_BYTES = 4
_TILE = 128
"""Weights of one filter per CTA, in shared memory."""
_LEAST_PIXELS = 64
"""Least pixels per part."""


@dataclass(frozen=True)
class AtomicRung(WeightGradientRung[ThreadsConfig]):
    """Rung whose threads add to the same fp32 sums."""

    dtypes: tuple[str, ...] = ("fp32",)
    takes_groups = True

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)


@dataclass(frozen=True)
class Atomics(AtomicRung):
    def recipe(self, problem: Conv2dWeightGradientProblem, config: ThreadsConfig) -> Recipe:
        f, elements = problem.forward, problem.part_elements
        add = KernelCall(
            Program.of("conv2d_weight_gradient/atomics.cu", problem=problem),
            (blocks(f.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("gradient"), Buffer(_SUMS), arguments.shape(f)),
            overlap=True,
        )
        finish = KernelCall(
            Program.of("conv2d_weight_gradient/atomics_finish.cu", problem=problem),
            (blocks(elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer(_SUMS), Buffer("y"), Buffer("bias_gradient", optional=True),
                Int64(f.weight_elements), Int64(elements),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((add, finish), (Workspace(_SUMS, _FP32_BYTES * elements, zeroed=True),))


@dataclass(frozen=True)
class SharedSums(AtomicRung):
    def recipe(self, problem: Conv2dWeightGradientProblem, config: ThreadsConfig) -> Recipe:
        f = problem.forward
        tiles = f.filters * ceil_div(f.weight_elements // f.filters, _TILE)
        # Enough parts to fill the card, but not with a few pixels each.
        most = ceil_div(f.output_pixels, _LEAST_PIXELS)
        part_pixels = ceil_div(f.output_pixels, max(1, min(most, ceil_div(self.card.busy_blocks, tiles))))
        count = ceil_div(f.output_pixels, part_pixels)
        product = KernelCall(
            Program.of("conv2d_weight_gradient/shared_sums.cu", problem=problem, config=config, tile=_TILE),
            (tiles, count, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("gradient"), Buffer(parts.PARTS), arguments.shape(f), Int64(part_pixels)),
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# Predictions for 64to64_56_k3s1 at batch 256, 30 G products.
ATOMICS = Atomics(
    "atomics",
    "one thread per element of the gradient adds to every weight that it met; not deterministic",
    None,
    None,
)
SHARED_SUMS = SharedSums(
    "shared_sums",
    "a CTA adds up 128 weights of a filter in shared memory, one pixel per warp; not deterministic",
    below="atomics",
    # atomics: 160 G per second in L2, 185 ms. Here 32 per dozen cycles and SM, as each is a loop: 47 ms.
    predicted_gain=4.0,
)


_MOST_PARTS = 256
_LEAST_DIRECT_PIXELS = 16
"""Least pixels per part."""


@dataclass(frozen=True)
class Direct(WeightGradientRung[ThreadsConfig]):
    last_resort = True
    takes_groups = True

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

    def recipe(self, problem: Conv2dWeightGradientProblem, config: ThreadsConfig) -> Recipe:
        pixels = problem.forward.output_pixels
        # Enough parts to fill the card, but not with a few pixels each.
        wanted = ceil_div(self.card.busy_blocks * 256, problem.part_elements)
        part_pixels = ceil_div(
            pixels, max(1, min(_MOST_PARTS, wanted, ceil_div(pixels, _LEAST_DIRECT_PIXELS)))
        )
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
