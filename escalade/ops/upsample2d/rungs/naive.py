"""One thread an output."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d.rungs.arguments import constants, passed


class Naive(Rung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: Upsample2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
        call = KernelCall(
            Program.of("upsample2d/naive.cu", "upsample2d_naive", constants(problem) | layout),
            (blocks(problem.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
NAIVE = Naive("naive", "one thread an output, its pixels read from global memory", None, None)
