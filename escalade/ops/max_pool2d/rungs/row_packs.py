"""Sixteen bytes of a row a thread, for a run of outputs in several rows."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.max_pool2d.rungs.naive import kept
from escalade.ops.shared import window_runs, windowed


class RowPacks(window_runs.RowPacks[MaxPool2dProblem]):
    source = "max_pool2d/row_packs.cu"

    def constants(self, problem: MaxPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | kept(problem)

    def operands(self) -> tuple[Argument, ...]:
        return (Buffer("places", optional=True),)


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
ROW_PACKS = RowPacks(
    "row_packs",
    "16 bytes of a row a thread, for a run of outputs in two rows",
    below="shared_tile",
    # 51 million outputs, of which a thread takes eight: 6 million threads of 150 instructions, near the rate of memory,
    # against 175 us.
    predicted_gain=1.4,
)
