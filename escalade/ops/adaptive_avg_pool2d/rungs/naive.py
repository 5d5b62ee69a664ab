"""One thread an output."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling


class Naive(Rung[AdaptiveAvgPool2dProblem]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(128),)

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {**pooling.constants(p), "NHWC": p.layout == "nhwc"}
        call = KernelCall(
            Program.of("adaptive_avg_pool2d/naive.cu", "adaptive_avg_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 512 channels of 7 x 7 to one mean each, batch 256, fp16: 13 MB, 3 us and a launch.
NAIVE = Naive("naive", "one thread an output, the window summed pixel by pixel", None, None)
