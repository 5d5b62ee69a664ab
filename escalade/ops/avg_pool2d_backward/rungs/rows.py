"""Up to sixteen bytes of a row a thread, for windows side by side in NCHW."""

from __future__ import annotations

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.avg_pool2d.rungs.naive import rules
from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import side_by_side


class Rows(Rung[AvgPool2dBackwardProblem]):
    def supports(self, problem: AvgPool2dBackwardProblem) -> str | None:
        return side_by_side.refusal(self.name, problem.forward)

    def configs(self, problem: AvgPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: AvgPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        f, buffers = problem.forward, (Buffer("gradient"), Buffer("y"))
        return side_by_side.recipe("avg_pool2d_backward/rows.cu", f, rules(f), buffers, config.threads)


# Predictions for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 168 MB, 39 us.
ROWS = Rows(
    "rows",
    "up to 16 bytes of a row a thread, for windows side by side in NCHW",
    below="naive",
    # 67 million threads of 130 instructions (300 us) against 43 us: a tenth more than the rate of memory.
    predicted_gain=7.0,
)
