"""One thread an output."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling, prologue


def rules(problem: AvgPool2dProblem) -> dict[str, Constant]:
    """What kernels/avg_pool2d/divisor.cuh leaves open."""
    return {"COUNT_PADDING": problem.count_padding, "DIVISOR": problem.divisor}


def windows(problem: AvgPool2dProblem) -> Ints:
    """`Windows` of kernels/avg_pool2d/windows.cuh."""
    p = problem
    return Ints((*p.kernel, *p.stride, *p.padding))


class Naive(Rung[AvgPool2dProblem]):
    def supports(self, problem: AvgPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: AvgPool2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: AvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {**pooling.constants(p), **rules(p), "NHWC": p.layout == "nhwc"}
        constants |= prologue.constants(p)
        call = KernelCall(
            Program.of("avg_pool2d/naive.cu", "avg_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), *prologue.tensors(), pooling.shape(p), windows(p)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 288 channels of 35 x 35, 3 x 3 windows, batch 32, fp16: 45 MB, 11 us.
NAIVE = Naive("naive", "one thread an output, every window read from global memory", None, None)
