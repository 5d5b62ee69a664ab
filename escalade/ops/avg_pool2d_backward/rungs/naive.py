"""One thread an input."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.avg_pool2d.rungs.naive import rules, windows
from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling


class Naive(Rung[AvgPool2dBackwardProblem]):
    def supports(self, problem: AvgPool2dBackwardProblem) -> str | None:
        return None

    def configs(self, problem: AvgPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: AvgPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        f = problem.forward
        constants: dict[str, Constant] = {**pooling.constants(f), **rules(f), "NHWC": f.layout == "nhwc"}
        call = KernelCall(
            Program.of("avg_pool2d_backward/naive.cu", "avg_pool2d_backward_naive", constants),
            (blocks(f.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), Buffer("y"), pooling.shape(f), windows(f)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 168 MB, 39 us.
NAIVE = Naive("naive", "one thread an input, every window that sees it read from global memory", None, None)
