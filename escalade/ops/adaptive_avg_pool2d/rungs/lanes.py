"""Several lanes of a warp share a window."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.adaptive_avg_pool2d.rungs.arguments import BUSY_THREADS
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import pooling


@dataclass(frozen=True)
class LanesConfig(Config):
    lanes: int
    """Lanes that share one output."""
    threads: int = 128


class Lanes(Rung[AdaptiveAvgPool2dProblem]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if problem.batch == 0:
            return f"{self.name} takes at least one image, for its idle lanes repeat the last output"
        if problem.output_elements * 32 >= 2**31:
            return f"{self.name} counts lanes in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        """Offers as many lanes as leave four loads or more to each, and more where the outputs are few."""
        every = (4, 8, 16, 32)
        enough = problem.largest_window // 4
        busy = BUSY_THREADS * self.card.multiprocessors // max(1, problem.output_elements)
        best = next((lanes for lanes in every if lanes >= max(enough, busy)), 32)
        return tuple(LanesConfig(lanes) for lanes in sorted(every, key=lambda lanes: (lanes != best, lanes)))

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, LanesConfig)
        constants: dict[str, Constant] = {
            **pooling.constants(problem),
            "WHOLE_ROWS": problem.output_width == 1,
            "LANES": config.lanes,
        }
        call = KernelCall(
            Program.of("adaptive_avg_pool2d/lanes.cu", "adaptive_avg_pool2d_lanes", constants),
            (blocks(problem.output_elements * config.lanes, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 512 channels of 7 x 7 to one mean each, batch 256, fp16: 13 MB, 3 us and a launch.
LANES = Lanes(
    "lanes",
    "several lanes of a warp share a window, read it side by side and meet by shuffles",
    below="naive",
    # A warp of the foot fetches 32 sectors for each of 49 steps, 205 MB out of L2 or L1 (18 us); side by side 6 us.
    predicted_gain=3.0,
)
