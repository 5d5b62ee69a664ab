"""Stem with one thread per output, and pooling as a separate launch."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.shared import activation
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.rungs import arguments


class Separate(Rung[StemProblem, ThreadsConfig]):
    def supports(self, problem: StemProblem) -> str | None:
        return None

    def configs(self, problem: StemProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: StemProblem, config: ThreadsConfig) -> Recipe:
        target = Buffer("unpooled" if problem.pool else "y")
        convolution = KernelCall(
            Program.of("stem/separate.cu", constants=activation.constants_of(problem), problem=problem),
            (blocks(problem.conv_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(Buffer("weight"), target), arguments.shape(problem)),
            overlap=True,
        )
        return arguments.then_pool(problem, (convolution,), ())


RUNGS: tuple[Rung[StemProblem], ...] = (
    Separate("separate", "one thread per output, converting on load; then pooling", None, None),
)
