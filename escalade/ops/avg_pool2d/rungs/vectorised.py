"""Sixteen bytes of channels a thread, for a run of outputs."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.avg_pool2d.rungs.naive import rules
from escalade.ops.shared import prologue, window_runs, windowed


class Vectorised(window_runs.ChannelPacks[AvgPool2dProblem]):
    source = "avg_pool2d/vectorised.cu"

    def constants(self, problem: AvgPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | rules(problem) | prologue.constants(problem)

    def operands(self) -> tuple[Argument, ...]:
        return prologue.tensors()


# Predictions for 288 channels of 35 x 35, 3 x 3 windows, batch 32, fp16: 45 MB, 11 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # 11 million threads of 150 instructions (56 us) against 15 us by the rate of L2.
    predicted_gain=3.0,
)
