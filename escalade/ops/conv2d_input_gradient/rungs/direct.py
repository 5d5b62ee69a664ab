"""One thread per element of dx; supports every problem."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Direct(Rung[Conv2dInputGradientProblem, ThreadsConfig]):
    last_resort = True

    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if reason := problem.beyond_dx(self.name):
            return reason
        return None

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Conv2dInputGradientProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            Program.of(
                "conv2d_input_gradient/direct.cu",
                constants=activation.constants_of(problem.forward),
                problem=problem,
            ),
            blocks(problem.elements, config.threads),
            config.threads,
            Buffer("gradient"),
            Buffer("weight"),
            Buffer(problem.aux, optional=True),
            Buffer("bias", optional=True),
            Buffer("y"),
            arguments.shape(problem.forward),
        )


# Prediction for 128to128_28_k3 at batch 256, 30 G products.
DIRECT = Direct(
    "direct",
    "one thread per element of dx, which gathers all its terms from global memory",
    below="atomics",
    # atomics: 160 G per second in L2, 185 ms. Two loads per multiply-add reach about 2 TFLOP/s, 30 ms.
    predicted_gain=6.2,
)
