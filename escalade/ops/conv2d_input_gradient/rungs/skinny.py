"""Input gradients with many channels and few filters, by conv2d's skinny."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING, tf32_tolerance
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.rungs import skinny
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.phases import pixel_phases


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
class Skinny(Rung[Conv2dInputGradientProblem]):
    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if reason := problem.beyond_dx(self.name):
            return reason
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.groups != 1 or f.stride != (1, 1):
            return f"{self.name} takes groups=1 and a stride of 1, not {f.groups} and {f.stride}"
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

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        products = round(problem.elements * problem.depth)
        tolerance = tf32_tolerance(problem.dtype, products, super().tolerance(problem, peer_error))
        return max(tolerance, SPLIT_ROUNDING) if problem.dtype == "fp32" else tolerance


# Prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP and 136 MB.
SKINNY = Skinny(
    "skinny",
    "few filters and many channels with stride 1: conv2d's skinny, which reads the filter in place and applies the "
    "mask itself",
    below="tensor_core",
    # An H200 took 102 us with tiles in shared memory. Here 134 MB at 85% of copy bandwidth are 38 us, plus 2 before.
    predicted_gain=2.5,
)
