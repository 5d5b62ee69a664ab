"""Sixteen bytes of channels a thread, for a run of outputs."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d.rungs.arguments import constants, passed

BUSY_THREADS = 2 * 2048
"""Threads a multiprocessor that fill it twice."""


@dataclass(frozen=True)
class ColumnsConfig(Config):
    columns: int
    """Neighbouring outputs that a thread takes."""
    threads: int = 128

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * p.output_height * blocks(p.output_width, self.columns) * vectors


class Vectorised(Rung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if ColumnsConfig(1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[Config, ...]:
        """The longest run that leaves the card busy."""
        every = tuple(ColumnsConfig(columns) for columns in (4, 2, 1))
        busy = BUSY_THREADS * self.card.multiprocessors
        default = next((run for run in every if run.threads_for(problem) >= busy), every[-1])
        return tuple(sorted(every, key=lambda run: run != default))

    def recipe(self, problem: Upsample2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ColumnsConfig)
        run = {"VECTOR": widest_vector(problem.dtype, problem.channels), "OUTPUT_COLUMNS": config.columns}
        call = KernelCall(
            Program.of("upsample2d/vectorised.cu", "upsample2d_vectorised", constants(problem) | run),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose row is found once",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 18 us: a fifth more than the rate of memory.
    predicted_gain=5.0,
)
