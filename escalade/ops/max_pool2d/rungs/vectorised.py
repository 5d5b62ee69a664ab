"""Sixteen bytes of channels a thread, for a run of outputs."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.max_pool2d.rungs import arguments
from escalade.ops.shared import pooling

BUSY_THREADS = 4 * 2048
"""Threads a multiprocessor that fill it four times."""


@dataclass(frozen=True)
class RunConfig(Config):
    rows: int
    columns: int
    """Outputs that a thread takes."""
    threads: int = 128

    def threads_for(self, problem: MaxPool2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.output_height, self.rows) * blocks(p.output_width, self.columns) * vectors

    def loads(self, problem: MaxPool2dProblem) -> tuple[int, int]:
        """Pixels in a row that a thread loads at once, and in all rows."""
        p = problem
        columns = (self.columns - 1) * p.stride[1] + p.kernel[1]
        return columns, columns * ((self.rows - 1) * p.stride[0] + p.kernel[0])


_RUNS = tuple(RunConfig(rows, columns) for rows, columns in ((2, 2), (1, 1), (1, 2), (1, 4), (2, 4)))

MOST_LOADS_IN_ROW = 11
"""Four registers each: what fits beside the results."""

MOST_LOADS = 81
"""Loads of a window at most: the code has no loop over them."""


class Vectorised(Rung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if not self.configs(problem):
            return f"{self.name} takes windows of up to {MOST_LOADS_IN_ROW} columns and {MOST_LOADS} pixels in all"
        if RunConfig(1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        """A square of outputs where that leaves the card busy, else one."""
        fitting = [run for run in _RUNS if self._fits(problem, run)]
        busy = _RUNS[0].threads_for(problem) >= BUSY_THREADS * self.card.multiprocessors
        default = _RUNS[0] if busy else _RUNS[1]
        return tuple(sorted(fitting, key=lambda run: run != default))

    def _fits(self, problem: MaxPool2dProblem, run: RunConfig) -> bool:
        row, total = run.loads(problem)
        return row <= MOST_LOADS_IN_ROW and total <= MOST_LOADS

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, RunConfig)
        constants = arguments.constants(problem) | {
            "VECTOR": widest_vector(problem.dtype, problem.channels),
            "OUTPUT_ROWS": config.rows,
            "OUTPUT_COLUMNS": config.columns,
        }
        call = KernelCall(
            Program.of("max_pool2d/vectorised.cu", "max_pool2d_vectorised", constants),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # At the rate of memory, 121 us, against 380 us.
    predicted_gain=3.0,
)
