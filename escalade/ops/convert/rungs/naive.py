"""One thread an element of the target."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Ints, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.convert.rungs import arguments


class Naive(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        return arguments.unsupported(self.name, problem, ("y",), takes_ways=True)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants = arguments.constants(p) | {"PITCHED": p.y_pitch > 0, "WAYS": p.ways}
        call = KernelCall(
            Program.of("convert/naive.cu", "convert_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                *arguments.TENSORS,
                Ints(
                    (p.batch, p.channels, p.stored_channels, p.padded_channels, p.pixels, p.y_pitch, p.step)
                ),
            ),
            overlap=True,
        )
        return Recipe((call,))


NAIVE = Naive("naive", "one thread an element of the target, in the target's order", None, None)
