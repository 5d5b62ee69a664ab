"""The likeliest classes with a thread or a warp a row."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.dtypes import element
from escalade.ops.shared import row_rungs
from escalade.ops.top_k.problem import TopKProblem


def constants(problem: TopKProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype), "K": problem.k}


@dataclass(frozen=True)
class PerRow(row_rungs.PerRow[TopKProblem]):
    operation = "top_k"

    def constants(self, problem: TopKProblem) -> dict[str, Constant]:
        return constants(problem)


# Predictions are for k = 5 and 10,000 rows of 1,000 classes in fp16: 20 MB, 4.7 us at the rate of a copy.
NAIVE = PerRow("naive", "one thread a row, in two passes", None, None, row_threads=1, threads=(64, 32, 128))

WARP_PER_ROW = PerRow(
    "warp_per_row",
    "a warp a row, in one pass: each lane keeps its best, and the best of the lanes' first are found by shuffles",
    below="naive",
    # naive: 2,000 loads in a row of some 200 clocks, and 1,000 visits to the list that diverge, 60 clocks each: 0.5
    # ms in two rounds. A warp a row: 19 rows for each scheduler, 32 steps of some 100 instructions: 40 us.
    predicted_gain=12.0,
    row_threads=32,
    threads=(256, 128, 512),
)
