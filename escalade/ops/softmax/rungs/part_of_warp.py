"""Softmax with a short row in the registers of a part of a warp."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import columns, row_rungs
from escalade.ops.softmax.problem import SoftmaxProblem
from escalade.ops.softmax.rungs import per_row

MOST_VALUES = 16
"""Values of a lane at most: several rows of a warp are under way at once, so it need not hold many."""
_THREADS = 128


@dataclass(frozen=True)
class LanesConfig(Config):
    lanes: int
    """Lanes of a row."""
    packs: int
    """Accesses that hold a lane's part of the row."""


def lanes_configs(classes: int, dtype: str) -> tuple[LanesConfig, ...]:
    """Ways to hold a short row in registers: by the fewest lanes that can, then by more."""
    width = widest_vector(dtype, classes)
    whole = classes // width
    found = (LanesConfig(lanes, ceil_div(whole, lanes)) for lanes in (1, 2, 4, 8, 16))
    return tuple(one for one in found if one.packs * width <= MOST_VALUES and one.lanes < 2 * whole)


def refusal_of_long(rung: str, classes: int, dtype: str) -> str | None:
    """Why a rung does not take rows of so many classes; None if it does."""
    if lanes_configs(classes, dtype):
        return None
    width = widest_vector(dtype, classes)
    return f"{rung} holds rows of up to {16 * MOST_VALUES // width * width} classes, not of {classes}"


@dataclass(frozen=True)
class PartOfWarp(Rung[SoftmaxProblem]):
    def supports(self, problem: SoftmaxProblem) -> str | None:
        too_long = refusal_of_long(self.name, problem.classes, problem.dtype)
        return too_long or columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: SoftmaxProblem) -> tuple[Config, ...]:
        return lanes_configs(problem.classes, problem.dtype)

    def recipe(self, problem: SoftmaxProblem, config: Config) -> Recipe:
        assert isinstance(config, LanesConfig)
        constants = {
            **per_row.constants(problem),
            "VECTOR": widest_vector(problem.dtype, problem.classes),
            "LANES": config.lanes,
            "PACKS": config.packs,
            "THREADS": _THREADS,
        }
        program = Program.of("softmax/part_of_warp.cu", "softmax_part_of_warp", constants)
        return row_rungs.launch(problem, program, ceil_div(problem.batch, _THREADS // config.lanes), _THREADS)


# Predictions are for 10,000 rows of 1,000 classes in fp16, which this rung does not take; for a million rows of 64,
# 134 MB in, 134 MB out, 63 us at the rate of a copy: 68 us.
PART_OF_WARP = PartOfWarp(
    "part_of_warp",
    "a short row in the registers of a part of a warp, so that no lane is idle",
    below="block_per_row",
    # of 64 classes 8 lanes of 32 are at work there: 230 us
    predicted_gain=3.4,
)
