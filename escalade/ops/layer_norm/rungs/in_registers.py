"""Layer normalisation with a row in the registers of as few threads as hold it."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.layer_norm.problem import LayerNormProblem
from escalade.ops.layer_norm.rungs.per_row import constants, launch
from escalade.ops.shared import columns

MOST_VALUES = 32
"""Values of a thread at most: a block of 1,024 threads has 64 registers for each."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class RegistersConfig(Config):
    row_threads: int
    """Threads of a row: a part of a warp, or whole warps."""
    packs: int
    """Accesses that hold a thread's part of the row."""
    threads: int
    """Threads of a block."""


@dataclass(frozen=True)
class InRegisters(Rung[LayerNormProblem]):
    def supports(self, problem: LayerNormProblem) -> str | None:
        if self._offered(problem):
            return columns.refusal_of_dense(self.name, problem.inner)
        width = widest_vector(problem.dtype, problem.features)
        most = MOST_THREADS * (MOST_VALUES // width) * width
        return f"rows of up to {most} features fit into registers; these have {problem.features}"

    def configs(self, problem: LayerNormProblem) -> tuple[Config, ...]:
        return self._offered(problem)

    def _offered(self, problem: LayerNormProblem) -> tuple[RegistersConfig, ...]:
        """Offers for many rows the fewest threads of which none is idle; for few rows as many as find work."""
        width = widest_vector(problem.dtype, problem.features)
        whole = problem.features // width
        offered: list[tuple[int, RegistersConfig]] = []
        for row_threads in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            packs = ceil_div(whole, row_threads)
            if packs * width <= MOST_VALUES:
                threads = 128 if row_threads <= 32 else row_threads  # warps of one row have a block
                offered.append((row_threads * packs - whole, RegistersConfig(row_threads, packs, threads)))
            if packs == 1:
                break
        if problem.batch <= self.card.filling:
            return tuple(config for _, config in reversed(offered))
        return tuple(config for _, config in sorted(offered, key=lambda one: one[0]))

    def recipe(self, problem: LayerNormProblem, config: Config) -> Recipe:
        assert isinstance(config, RegistersConfig)
        program = Program.of(
            "layer_norm/in_registers.cu",
            "layer_norm_in_registers",
            {
                **constants(problem),
                "VECTOR": widest_vector(problem.dtype, problem.features),
                "ROW_THREADS": config.row_threads,
                "PACKS": config.packs,
                "THREADS": config.threads,
            },
        )
        grid = ceil_div(problem.batch, config.threads // config.row_threads)
        return launch(problem, program, grid, config.threads)


# Predictions are for 100,352 rows of 96 features in fp16: 19 MB in, 19 MB out, 9.2 us at the rate of a copy.
IN_REGISTERS = InRegisters(
    "in_registers",
    "16 bytes a load and the row in the registers of as few threads as hold it: read once",
    below="warp_per_row",
    # 10.5 us, near the copy, against 30.
    predicted_gain=2.9,
)
