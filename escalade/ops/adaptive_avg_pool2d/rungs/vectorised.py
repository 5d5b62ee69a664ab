"""Sixteen bytes of channels a lane, a window shared by the lanes of a block."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.adaptive_avg_pool2d.rungs.arguments import BUSY_THREADS
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import pooling

VECTOR_LANES = 8
"""Vectors of channels that a block of kernels/adaptive_avg_pool2d/vectorised.cu takes."""


@dataclass(frozen=True)
class SplitConfig(Config):
    splits: int
    """Groups of lanes that share a window."""


class Vectorised(Rung[AdaptiveAvgPool2dProblem]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if self._blocks(problem) >= 2**31:
            return f"{self.name} counts blocks in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        """The fewest that keep the card busy, and no more than leave a lane four loads."""
        every = (4, 8, 16, 32)
        wanted = BUSY_THREADS * self.card.multiprocessors / (self._blocks(problem) * VECTOR_LANES)
        best = next((splits for splits in every if splits >= min(wanted, problem.largest_window / 4)), 32)
        return tuple(
            SplitConfig(splits) for splits in sorted(every, key=lambda splits: (splits != best, splits))
        )

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, SplitConfig)
        constants: dict[str, Constant] = {
            **pooling.constants(problem),
            "WHOLE_ROWS": problem.output_width == 1,
            "VECTOR": widest_vector(problem.dtype, problem.channels),
            "SPLITS": config.splits,
        }
        call = KernelCall(
            Program.of("adaptive_avg_pool2d/vectorised.cu", "adaptive_avg_pool2d_vectorised", constants),
            (self._blocks(problem), 1, 1),
            (VECTOR_LANES * config.splits, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem), self._channel_blocks(problem)),
            overlap=True,
        )
        return Recipe((call,))

    def _channel_blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return blocks(problem.channels, VECTOR_LANES * widest_vector(problem.dtype, problem.channels))

    def _blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        pixels = problem.batch * problem.output_height * problem.output_width
        return max(1, pixels * self._channel_blocks(problem))


# Predictions for 512 channels of 7 x 7 to one mean each, batch 256, fp16: 13 MB, 3 us and a launch.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a lane, a window's pixels dealt out to the lanes of a block, which meet in shared memory",
    below="naive",
    # The foot waits 49 / 4 times for memory, 0.8 us each (10 us); here once or twice.
    predicted_gain=2.5,
)
