"""The likeliest classes: a thread a row, a warp a row, and as many warps as the row is wide."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Recipe
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import row_rungs
from escalade.ops.top_k.problem import TopKProblem


def _constants(problem: TopKProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype), "K": problem.k}


@dataclass(frozen=True)
class PerRow(row_rungs.PerRow[TopKProblem]):
    operation = "top_k"

    def constants(self, problem: TopKProblem) -> dict[str, Constant]:
        return _constants(problem)


@dataclass(frozen=True)
class BlockConfig(Config):
    warps: int
    """Warps of a row."""
    in_flight: int
    """Loads of a thread."""
    rows: int
    """Rows of a block."""


@dataclass(frozen=True)
class BlockPerRow(Rung[TopKProblem]):
    def supports(self, problem: TopKProblem) -> str | None:
        return None

    def configs(self, problem: TopKProblem) -> tuple[Config, ...]:
        """Offers for many rows one warp each if some four loads a lane cover it; for few rows as many warps as find
        work."""
        packs = problem.classes // widest_vector(problem.dtype, problem.classes)
        each = 32 if problem.batch <= self.card.filling else 32 * 8
        offered = []
        for warps in sorted((1, 2, 4, 8, 16), key=lambda warps: abs(ceil_div(packs, each) - warps)):
            in_flight = min(4, ceil_div(packs, 32 * warps))
            offered.append(BlockConfig(warps, in_flight, 4 if warps == 1 else 1))
        return tuple(offered)

    def recipe(self, problem: TopKProblem, config: Config) -> Recipe:
        assert isinstance(config, BlockConfig)
        constants = {
            **_constants(problem),
            "VECTOR": widest_vector(problem.dtype, problem.classes),
            "WARPS": config.warps,
            "IN_FLIGHT": config.in_flight,
            "ROWS": config.rows,
        }
        program = Program.of("top_k/block_per_row.cu", "top_k_block_per_row", constants)
        grid = ceil_div(problem.batch, config.rows)
        return row_rungs.launch(problem, program, grid, 32 * config.warps * config.rows)


# Predictions are for k = 5 and 10,000 rows of 1,000 classes in fp16: 20 MB, 4.7 us at the rate of a copy.
RUNGS: tuple[Rung[TopKProblem], ...] = (
    PerRow("naive", "one thread a row, in two passes", None, None, row_threads=1, threads=(64, 32, 128)),
    PerRow(
        "warp_per_row",
        "a warp a row, in one pass: each lane keeps its best, and the best of the lanes' first are found by shuffles",
        below="naive",
        # naive: 2,000 loads in a row of some 200 clocks, and 1,000 visits to the list that diverge, 60 clocks each: 0.5
        # ms in two rounds. A warp a row: 19 rows for each scheduler, 32 steps of some 100 instructions: 40 us.
        predicted_gain=12.0,
        row_threads=32,
        threads=(256, 128, 512),
    ),
    BlockPerRow(
        "block_per_row",
        "up to 16 bytes a load, sums rescaled once a load, and as many warps a row as it is wide, their lists merged "
        "in shared memory",
        below="warp_per_row",
        # One exponential an element instead of two and an eighth of the loads; the lists cost the same: 28 us.
        predicted_gain=1.4,
    ),
)
