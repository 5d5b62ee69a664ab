"""One thread an element of dx: the rung that can do every problem."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Direct(Rung[Conv2dInputGradientProblem]):
    last_resort = True

    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        return None

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Conv2dInputGradientProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        constants: dict[str, Constant] = {
            "Element": element(problem.dtype),
            "NHWC": problem.layout == "nhwc",
            "HAS_MASK": problem.mask,
            "HAS_BIAS": problem.forward.bias,
            "HAS_RESIDUAL": problem.forward.residual,
            **activation.constants_of(problem.forward),
        }
        call = KernelCall(
            Program.of("conv2d_input_gradient/direct.cu", "conv2d_input_gradient_direct", constants),
            (blocks(problem.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("gradient"),
                Buffer("weight"),
                Buffer(problem.companion, optional=True),
                Buffer("bias", optional=True),
                Buffer("y"),
                arguments.shape(problem.forward),
            ),
            overlap=True,
        )
        return Recipe((call,))


DIRECT = Direct("direct", "one thread an element of dx, which gathers all its terms from memory", None, None)
