"""Softmax with a thread or a warp a row."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.dtypes import element
from escalade.ops.shared import columns, row_rungs
from escalade.ops.softmax.problem import SoftmaxProblem


def constants(problem: SoftmaxProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype)}


@dataclass(frozen=True)
class PerRow(row_rungs.PerRow[SoftmaxProblem]):
    operation = "softmax"

    def supports(self, problem: SoftmaxProblem) -> str | None:
        return columns.refusal_of_dense(self.name, problem.inner)

    def constants(self, problem: SoftmaxProblem) -> dict[str, Constant]:
        return constants(problem)


# Predictions are for 10,000 rows of 1,000 classes in fp16: 20 MB in, 20 MB out, 9.4 us at the rate of a copy.
NAIVE = PerRow("naive", "one thread a row, in three passes", None, None, row_threads=1, threads=(64, 32, 128))

WARP_PER_ROW = PerRow(
    "warp_per_row",
    "a warp a row: largest and sum in one pass, merged by shuffles, then a pass that writes",
    below="naive",
    # naive: 157 blocks on 132 multiprocessors, 2 warps each with one load of L1 or L2 at a time, 3,000 times some
    # 200 clocks, in two rounds: 0.7 ms. A warp a row: 10 M elements, two exponentials each: 25 us.
    predicted_gain=28.0,
    row_threads=32,
    threads=(256, 128, 512),
)
