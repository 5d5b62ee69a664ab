"""Input gradients with few channels, or transposed convolutions to few, by conv2d's col2im, at any stride."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING, tf32_tolerance
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.rungs import col2im
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem


def _scatter(problem: Conv2dInputGradientProblem) -> col2im.Scatter:
    f = problem.forward
    return col2im.Scatter(
        f.dtype, f.element_bytes, f.batch, f.filters, f.channels, (f.output_height, f.output_width),
        (f.height, f.width), (f.filter_height, f.filter_width), f.stride, f.padding, f.dilation,
        transposed=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Col2im(Rung[Conv2dInputGradientProblem]):
    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if reason := problem.beyond_dx(self.name):
            return reason
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.groups != 1:
            return f"{self.name} takes groups=1, not {f.groups}; direct takes any"
        if problem.aux:
            return f"{self.name} does not support a {problem.aux}"
        return _scatter(problem).unsupported(self.name, self.card)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return col2im.configs(_scatter(problem), self.card)

    def estimate(self, problem: Conv2dInputGradientProblem, config: Config) -> float:
        return col2im.microseconds(_scatter(problem), config, self.card, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: Config) -> Recipe:
        epilogue = Epilogue.of(problem.forward)
        buffers = (Buffer("gradient"), Buffer("weight"), Buffer("bias", optional=True), Buffer("y"))
        return Recipe((col2im.launch(_scatter(problem), config, self.card, epilogue, buffers),))

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        products = round(problem.elements * problem.depth)
        tolerance = tf32_tolerance(problem.dtype, products, super().tolerance(problem, peer_error))
        return max(tolerance, SPLIT_ROUNDING) if problem.dtype == "fp32" else tolerance


# Prediction for 3to256_32_k4s2p1 at batch 256 in fp16, 1.6 GFLOP and 35 MB.
COL2IM = Col2im(
    "col2im",
    "few channels at any stride: conv2d's col2im as a transposed convolution, whose results gather their products",
    below="tensor_core",
    # Four phases by im2col, each with 61 columns for 3 that exist, are 110 us by estimate. Here 35 MB at 85% of copy
    # bandwidth are 10 us, plus 4 before and after.
    predicted_gain=8.0,
)
