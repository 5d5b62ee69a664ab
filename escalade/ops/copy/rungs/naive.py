"""One thread an element."""

from __future__ import annotations

from typing import ClassVar

from escalade.device.program import Constant, Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.copy.problem import CopyProblem, Part
from escalade.ops.copy.rungs.arguments import Laid, launches_of, moved_as, table


class Naive(Rung[CopyProblem]):
    last_resort: ClassVar[bool] = True

    def supports(self, problem: CopyProblem) -> str | None:
        most = max(max(part.sizes) for part in problem.parts)
        if most >= 2**32:
            return f"{self.name} counts up to 2^32 along a dimension; {most} elements are too many"
        return None

    def configs(self, problem: CopyProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512))

    def recipe(self, problem: CopyProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        return Recipe(tuple(self._launch(problem, parts, config) for parts in launches_of(problem)))

    def _launch(self, problem: CopyProblem, parts: tuple[Part, ...], config: ThreadsConfig) -> KernelCall:
        laid = [
            Laid(part, part.sizes, part.x_strides, part.y_strides, blocks(part.elements, config.threads))
            for part in parts
        ]
        rank = max(len(part.sizes) for part in parts)
        constants: dict[str, Constant] = {"Element": moved_as(problem), "PARTS": len(parts), "RANK": rank}
        return KernelCall(
            Program.of("copy/naive.cu", "copy_naive", constants),
            (sum(one.blocks for one in laid), 1, 1),
            (config.threads, 1, 1),
            table(laid, rank, ELEMENT_BYTES[problem.dtype]),
            overlap=True,
        )


# Predictions for 32 matrices of 196 x 512 turned, fp16: 12.8 MB, 3 us and a launch.
NAIVE = Naive("naive", "one thread an element, in the order of the result, its place by division", None, None)
