"""One thread an output."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.shared import pooling


def windows(problem: MaxPool2dProblem) -> Ints:
    """`Windows` of kernels/max_pool2d/windows.cuh."""
    p = problem
    return Ints((*p.kernel, *p.stride, *p.padding, *p.dilation))


def kept(problem: MaxPool2dProblem) -> dict[str, Constant]:
    """What kernels that can tell the places of maxima leave open."""
    return {"PLACES": problem.places, "BEHIND_RELU": problem.behind_relu}


class Naive(Rung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        layout: dict[str, Constant] = {"NHWC": p.layout == "nhwc"}
        constants = pooling.constants(p) | layout | kept(p)
        call = KernelCall(
            Program.of("max_pool2d/naive.cu", "max_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), Buffer("places", optional=True), pooling.shape(p), windows(p)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
NAIVE = Naive("naive", "one thread an output, every window read from global memory", None, None)
