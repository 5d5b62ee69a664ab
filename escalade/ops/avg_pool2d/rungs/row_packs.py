"""Sixteen bytes of a row a thread, for a run of outputs in several rows."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.avg_pool2d.rungs.naive import rules
from escalade.ops.shared import prologue, window_runs, windowed


class RowPacks(window_runs.RowPacks[AvgPool2dProblem]):
    source = "avg_pool2d/row_packs.cu"

    def constants(self, problem: AvgPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | rules(problem) | prologue.constants(problem)

    def operands(self) -> tuple[Argument, ...]:
        return prologue.tensors()


# Predictions for 64 channels of 64 x 64, 3 x 3 windows with stride 2, batch 256, fp16, in NCHW: 168 MB, 40 us.
ROW_PACKS = RowPacks(
    "row_packs",
    "16 bytes of a row a thread, for a run of outputs in two rows",
    below="naive",
    # 17 million threads of 130 instructions each, measured: 177 us. A sixth of the threads, of 150: 45 us.
    predicted_gain=3.9,
)
