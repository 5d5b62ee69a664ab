"""Up to sixteen bytes of a row a thread, for windows side by side in NCHW."""

from __future__ import annotations

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import constants
from escalade.ops.shared import side_by_side


class Rows(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return side_by_side.refusal(self.name, problem.forward)

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        found = Buffer("x", optional=True), Buffer("places", optional=True)
        buffers = (Buffer("gradient"), *found, Buffer("y"))
        source = "max_pool2d_backward/rows.cu"
        return side_by_side.recipe(source, problem.forward, constants(problem), buffers, config.threads)


# Predictions for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 302 MB, 71 us; 185 MB, 43 us by
# stored places.
ROWS = Rows(
    "rows",
    "up to 16 bytes of a row a thread, for windows side by side in NCHW",
    below=("gathered", "stored"),
    # 67 million threads of 150 instructions (350 us) against 50 us: a tenth more than the rate of memory.
    predicted_gain=7.0,
)
