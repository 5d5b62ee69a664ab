"""Input gradients in NCHW on Hopper, in TF32: transposed convolutions by conv2d's planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import Recipe
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.rungs import sm90_planes
from escalade.ops.conv2d.rungs.rung import truncated_tolerance
from escalade.ops.conv2d.rungs.sm90_planes import PlanesConfig, Transposed
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung

MOST_PHASES = 4
"""Largest stride."""


def _convolution(problem: Conv2dInputGradientProblem) -> Conv2dProblem:
    """Return the convolution of stride 1 over dy with a filter for every channel and phase.

    Row h of x is row u of phase a, h = u * stride + a - padding. It meets the taps a, a + stride, … of rows u, u - 1, …
    """
    f = problem.forward
    taps = ceil_div(f.filter_height, f.stride[0]), ceil_div(f.filter_width, f.stride[1])
    return Conv2dProblem(
        f.batch, f.filters, f.output_height, f.output_width, f.channels * f.stride[0] * f.stride[1], *taps,
        padding=(taps[0] - 1, taps[1] - 1), dtype=f.dtype, layout=f.layout, bias=f.bias, residual=f.residual,
        relu=f.relu, activation=f.activation,
    )  # fmt: skip


@dataclass(frozen=True)
class Planes(InputGradientRung[PlanesConfig]):
    dtypes: tuple[str, ...] = ("tf32",)
    layouts: tuple[str, ...] = ("nchw",)
    intended_spill: ClassVar = sm90_planes.SPILL

    architectures = WITH_WGMMA

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if f.dilation != (1, 1) or f.pools:
            return f"{self.name} takes no dilation or pool, not {f.name}"
        if max(f.stride) > MOST_PHASES:
            return f"{self.name} takes strides up to {MOST_PHASES}, not {f.stride}"
        c = _convolution(problem)
        blocks = (
            ceil_div(f.height + f.padding[0], f.stride[0]),
            ceil_div(f.width + f.padding[1], f.stride[1]),
        )
        if blocks[0] > c.output_height or blocks[1] > c.output_width:
            return f"{self.name} needs a window for every pixel of x; {f.name} has pixels beyond the last"
        return sm90_planes.planes_refusal(self.name, c, self.card)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[PlanesConfig, ...]:
        return sm90_planes.best_first(_convolution(problem), self.card)

    def estimate(self, problem: Conv2dInputGradientProblem, config: PlanesConfig) -> float:
        clocks = sm90_planes.planes_clocks(_convolution(problem), config, self.card)
        return self.card.microseconds(clocks, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: PlanesConfig) -> Recipe:
        f = problem.forward
        phases = Transposed(f.stride, f.padding, (f.height, f.width), (f.filter_height, f.filter_width))
        return sm90_planes.planes_recipe(
            _convolution(problem), config, self.card, phases, problem.aux or "residual"
        )

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        return truncated_tolerance(_convolution(problem), super().tolerance(problem, peer_error))


PLANES = Planes(
    "planes",
    "NCHW without conversions: conv2d's planes with the filters of all phases, which scatters its results",
    below="subpixel",
    # 32to32_513_k4s2p1 at batch 32, 69 GFLOP and 1.35 GB: 0.32 ms of traffic, and stores that do not overlap the
    # products, 0.25 ms. An H200 took 3.1 ms with subpixel and two conversions.
    predicted_gain=5.0,
)
