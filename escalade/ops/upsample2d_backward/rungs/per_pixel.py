"""One thread an input."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling
from escalade.ops.upsample2d.rungs.arguments import constants
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem


class PerPixel(Rung[Upsample2dBackwardProblem]):
    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        return None

    def configs(self, problem: Upsample2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: Upsample2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        f = problem.forward
        layout: dict[str, Constant] = {"NHWC": f.layout == "nhwc"}
        call = KernelCall(
            Program.of(
                "upsample2d_backward/per_pixel.cu", "upsample2d_backward_per_pixel", constants(f) | layout
            ),
            (blocks(f.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp16: 168 MB, 39 us.
PER_PIXEL = PerPixel(
    "per_pixel",
    "one thread an input, which finds the outputs that are made of it and adds them up",
    None,
    None,
)
