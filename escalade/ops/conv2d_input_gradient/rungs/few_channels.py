"""Input gradients with few filters by conv2d's skinny, and with few channels by its col2im."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.rungs import col2im, skinny
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.phases import pixel_phases
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung


def _bands(problem: Conv2dInputGradientProblem) -> skinny.Bands:
    """Return the bands of dy that pixels of x read, with stride 1."""
    f = problem.forward
    (phase,) = pixel_phases(f)
    return skinny.Bands(
        f.dtype, f.element_bytes, f.batch, f.filters, f.channels, (f.output_height, f.output_width),
        (f.height, f.width), (phase.rows.taps, phase.columns.taps), (1, 1), (phase.rows.lower, phase.columns.lower),
        f.dilation,
    )  # fmt: skip


@dataclass(frozen=True)
class Skinny(InputGradientRung):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = SPLIT_ROUNDING

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        if problem.forward.stride != (1, 1):
            return f"{self.name} takes stride 1, not {problem.forward.stride}; col2im takes any"
        return _bands(problem).unsupported(self.name)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return skinny.best_first(_bands(problem), self.card)

    def estimate(self, problem: Conv2dInputGradientProblem, config: Config) -> float:
        return skinny.microseconds(_bands(problem), config, self.card, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: Config) -> Recipe:
        epilogue = replace(Epilogue.of(problem.forward), mask=problem.mask)
        buffers = (
            Buffer("gradient"),
            Buffer("weight"),
            Buffer("bias", optional=True),
            Buffer(problem.aux, optional=True),
            Buffer("y"),
            Buffer("places", optional=True),
        )
        return Recipe((skinny.launch(_bands(problem), config, self.card, epilogue, True, buffers),))


# Prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP and 136 MB.
SKINNY = Skinny(
    "skinny",
    "few filters and many channels with stride 1: conv2d's skinny, which reads the filter in place and applies the "
    "mask itself",
    below="tensor_core",
    # An H200 took 102 us with tiles in shared memory. Here 134 MB at 85% of copy bandwidth are 38 us, plus 2 before.
    predicted_gain=2.5,
)


def _scatter(problem: Conv2dInputGradientProblem) -> col2im.Scatter:
    f = problem.forward
    return col2im.Scatter(
        f.dtype, f.element_bytes, f.batch, f.filters, f.channels, (f.output_height, f.output_width),
        (f.height, f.width), (f.filter_height, f.filter_width), f.stride, f.padding, f.dilation,
        transposed=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Col2im(InputGradientRung):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = SPLIT_ROUNDING
    supports_aux = False

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        return _scatter(problem).unsupported(self.name, self.card)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return col2im.configs(_scatter(problem), self.card)

    def estimate(self, problem: Conv2dInputGradientProblem, config: Config) -> float:
        return col2im.microseconds(_scatter(problem), config, self.card, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: Config) -> Recipe:
        epilogue = Epilogue.of(problem.forward)
        buffers = (Buffer("gradient"), Buffer("weight"), Buffer("bias", optional=True), Buffer("y"))
        return Recipe((col2im.launch(_scatter(problem), config, self.card, epilogue, buffers),))


# Prediction for 3to256_32_k4s2p1 at batch 256 in fp16, 1.6 GFLOP and 35 MB.
COL2IM = Col2im(
    "col2im",
    "few channels at any stride: conv2d's col2im as a transposed convolution, whose results gather their products",
    below="tensor_core",
    # Four phases by im2col, each with 61 columns for 3 that exist, are 110 us by estimate. Here 35 MB at 85% of copy
    # bandwidth are 10 us, plus 4 before and after.
    predicted_gain=8.0,
)
