"""One thread an element."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.pixel_shuffle.rungs.arguments import constants, passed


class Naive(Rung[PixelShuffleProblem]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: PixelShuffleProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: PixelShuffleProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
        call = KernelCall(
            Program.of("pixel_shuffle/naive.cu", "pixel_shuffle_naive", constants(problem) | layout),
            (blocks(problem.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
NAIVE = Naive("naive", "one thread an element, in the order of the larger image", None, None)
