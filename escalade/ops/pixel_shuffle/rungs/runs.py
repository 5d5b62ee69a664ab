"""Neighbours in a row of the larger image a thread."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.pixel_shuffle.rungs.arguments import constants, passed


class Runs(Rung[PixelShuffleProblem]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if self._threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: PixelShuffleProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128))

    def recipe(self, problem: PixelShuffleProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        run = {"RUN": self._run(problem)}
        call = KernelCall(
            Program.of("pixel_shuffle/runs.cu", "pixel_shuffle_runs", constants(problem) | run),
            (blocks(self._threads(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))

    def _run(self, problem: PixelShuffleProblem) -> int:
        return widest_vector(problem.dtype, problem.small[1] * problem.factor)

    def _threads(self, problem: PixelShuffleProblem) -> int:
        return problem.elements // self._run(problem)


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
RUNS = Runs(
    "runs",
    "neighbours in a row of the larger image a thread, 16 bytes at once, whose place is found once",
    below="naive",
    # 34 million threads with four divisions of 64 bits each (200 us) against 35 us.
    predicted_gain=5.0,
)
