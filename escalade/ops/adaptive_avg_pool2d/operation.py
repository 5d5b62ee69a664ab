"""The ladder of adaptive_avg_pool2d."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.adaptive_avg_pool2d import reference
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.base.dtypes import DTYPES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS

BUSY_THREADS = 1024
"""Threads a multiprocessor that fill it by half."""


class Naive(Rung[AdaptiveAvgPool2dProblem]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        return None

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(128),)

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {"Element": element(p.dtype), "NHWC": p.layout == "nhwc"}
        call = KernelCall(
            Program.of("adaptive_avg_pool2d/naive.cu", "adaptive_avg_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p)),
            overlap=True,
        )
        return Recipe((call,))


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
        return None

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
            "Element": element(problem.dtype),
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
        return None

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        """The fewest that keep the card busy, and no more than the window has pixels."""
        every = (4, 8, 16, 32)
        wanted = BUSY_THREADS * self.card.multiprocessors / (self._blocks(problem) * VECTOR_LANES)
        best = next((splits for splits in every if splits >= min(wanted, problem.largest_window)), 32)
        return tuple(
            SplitConfig(splits) for splits in sorted(every, key=lambda splits: (splits != best, splits))
        )

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, SplitConfig)
        constants: dict[str, Constant] = {
            "Element": element(problem.dtype),
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
RUNGS: tuple[Rung[AdaptiveAvgPool2dProblem], ...] = (
    Naive("naive", "one thread an output, the window summed pixel by pixel", None, None),
    Lanes(
        "lanes",
        "several lanes of a warp share a window, read it side by side and meet by shuffles",
        below="naive",
        # A warp of the foot fetches 32 sectors for each of 49 steps, 205 MB out of L2 or L1 (18 us); side by side 6 us.
        predicted_gain=3.0,
    ),
    Vectorised(
        "vectorised",
        "16 bytes of channels a lane, a window's pixels dealt out to the lanes of a block, which meet in shared memory",
        below="naive",
        # The foot waits 49 / 4 times for memory, 0.8 us each (10 us); here once or twice.
        predicted_gain=2.5,
    ),
)


def _square(channels: int, size: int, output: int, batch: int = 1) -> AdaptiveAvgPool2dProblem:
    return AdaptiveAvgPool2dProblem(batch, channels, size, size, (output, output))


PROBLEMS = tuple(_square(512, 7, 1, batch) for batch in (1, 32, 256))
"""What `escalade ladder adaptive_avg_pool2d` measures: ResNet's, in every dtype and layout that a rung supports."""

SMALL_PROBLEMS = (
    _square(72, 7, 1, batch=2),
    _square(64, 16, 1),
    _square(20, 13, 6, batch=2),
    _square(5, 3, 7),
    AdaptiveAvgPool2dProblem(3, 36, 9, 5, (2, 4)),
    AdaptiveAvgPool2dProblem(1, 3, 17, 11, (1, 3)),
    _square(1, 1, 1),
)
"""Small problems that between them have the whole image, windows that overlap, repeat a pixel and differ in size, and
odd channels."""


class AdaptiveAvgPool2d(Operation[AdaptiveAvgPool2dProblem]):
    name = "adaptive_avg_pool2d"
    problem = AdaptiveAvgPool2dProblem
    in_pytorch = reference
    ladder = Ladder("adaptive_avg_pool2d", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: AdaptiveAvgPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "lanes", "naive")


ADAPTIVE_AVG_POOL2D = AdaptiveAvgPool2d()
