"""Neighbouring outputs of a plane a thread."""

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


@dataclass(frozen=True)
class RunsConfig(Config):
    rows: int
    columns: int
    """Neighbouring outputs that a thread takes, down and along."""
    threads: int = 256

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        groups = blocks(p.output_height, self.rows) * (p.output_width // self.columns)
        return p.batch * p.channels * groups


class Runs(Rung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if RunsConfig(1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: Upsample2dProblem) -> tuple[Config, ...]:
        """Copies are stored 16 bytes at once; sums share the columns of several rows instead."""
        widest = widest_vector(problem.dtype, problem.output_width)
        copies, sums = RunsConfig(1, widest), RunsConfig(4, min(2, widest))
        return (copies, sums) if problem.taps == 1 else (sums, copies)

    def recipe(self, problem: Upsample2dProblem, config: Config) -> Recipe:
        assert isinstance(config, RunsConfig)
        run = {"ROWS": config.rows, "COLUMNS": config.columns}
        call = KernelCall(
            Program.of("upsample2d/runs.cu", "upsample2d_runs", constants(problem) | run),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
RUNS = Runs(
    "runs",
    "neighbouring outputs of a plane a thread, whose place, rows and columns are found once",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 20 an output (18 us).
    predicted_gain=5.0,
)
