"""One CTA per image, single-element loads."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem
from escalade.ops.squeeze_excite.rungs.arguments import BUFFERS, generated, x_pitch


class Naive(Rung[SqueezeExciteProblem, ThreadsConfig]):
    def supports(self, problem: SqueezeExciteProblem) -> str | None:
        return None

    def configs(self, problem: SqueezeExciteProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(256),)

    def recipe(self, problem: SqueezeExciteProblem, config: ThreadsConfig) -> Recipe:
        call = KernelCall(
            Program.of(
                "squeeze_excite/naive.cu", constants=generated(problem), problem=problem, config=config
            ),
            (problem.batch, 1, 1),
            (config.threads, 1, 1),
            (*BUFFERS, x_pitch(problem)),
            shared_bytes=4 * (problem.channels + problem.squeezed),
            overlap=True,
        )
        return Recipe((call,))


NAIVE = Naive(
    "naive",
    "one CTA per image; a thread sums the pixels of a channel, then the products of a feature",
    None,
    None,
)
