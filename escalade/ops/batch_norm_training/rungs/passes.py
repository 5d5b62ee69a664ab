"""A pass for the statistics and one that normalises, by rungs of those operations: the rungs of batch_norm_training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from escalade.device.recipe import Buffer, Recipe, Workspace
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.batch_norm.operation import BATCH_NORM
from escalade.ops.batch_norm.problem import BatchNormProblem
from escalade.ops.batch_norm.rungs.normalise import START_US, PacksConfig
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.batch_statistics.operation import BATCH_STATISTICS
from escalade.ops.batch_statistics.problem import BatchStatisticsProblem
from escalade.ops.batch_statistics.rungs.statistics import SplitConfig

_LAUNCHES = 3


@dataclass(frozen=True)
class TwoPasses(Rung[BatchNormTrainingProblem]):
    """The statistics lie in a workspace between the passes."""

    first: str
    """The rung of batch_statistics."""
    second: str
    """The rung of batch_norm."""

    @property
    def _first(self) -> Rung[BatchStatisticsProblem]:
        return BATCH_STATISTICS.ladder.rung(self.first).on(self.card)

    @property
    def _second(self) -> Rung[BatchNormProblem]:
        return BATCH_NORM.ladder.rung(self.second).on(self.card)

    def supports(self, problem: BatchNormTrainingProblem) -> str | None:
        refusal = self._second.supports(problem.normalisation)
        return refusal and refusal.replace(f"`{BELOW_WIDE}`", "`one_pass`")

    def configs(self, problem: BatchNormTrainingProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512))

    def parts(self, problem: BatchNormTrainingProblem, config: Config) -> tuple[Config, Config]:
        """The configs of both passes."""
        return config, config

    def estimate(self, problem: BatchNormTrainingProblem, config: Config) -> float | None:
        return None

    def recipe(self, problem: BatchNormTrainingProblem, config: Config) -> Recipe:
        first, second = self.parts(problem, config)
        statistics, variance = Buffer("statistics"), Buffer("statistics", offset=4 * problem.channels)
        passes = (
            self._first.recipe(problem.statistics, first).remap({"y": statistics}),
            self._second.recipe(problem.normalisation, second).remap(
                {"mean": statistics, "variance": variance}
            ),
        )
        between = Workspace(statistics.name, 2 * 4 * problem.channels)
        workspaces = (between, *(one for part in passes for one in part.workspaces))
        return Recipe(tuple(step for part in passes for step in part.steps), workspaces)


@dataclass(frozen=True)
class WideConfig(SplitConfig):
    """The statistics' config, and that of the second pass."""

    second_threads: int = 256
    second_packs: int = 4
    turns: int = 1


@dataclass(frozen=True)
class Wide(TwoPasses):
    """Both passes with up to 16 bytes an access."""

    def configs(self, problem: BatchNormTrainingProblem) -> tuple[Config, ...]:
        """Offers each pass's configs beside the other's best."""
        first: tuple[Any, ...] = self._first.configs(problem.statistics)
        second: tuple[Any, ...] = self._second.configs(problem.normalisation)
        offered = [
            WideConfig(
                **asdict(one), second_threads=other.threads, second_packs=other.packs, turns=other.turns
            )
            for one, other in (
                *zip_longest(first, second[:1], fillvalue=second[0]),
                *zip_longest(first[:1], second, fillvalue=first[0]),
            )
        ]
        return tuple(dict.fromkeys(offered))

    def parts(self, problem: BatchNormTrainingProblem, config: Config) -> tuple[Config, Config]:
        assert isinstance(config, WideConfig)
        return (
            SplitConfig(config.threads, config.packs, config.blocks),
            PacksConfig(config.second_threads, config.second_packs, config.turns, backwards=True),
        )

    def estimate(self, problem: BatchNormTrainingProblem, config: Config) -> float:
        return _LAUNCHES * START_US + self.card.microseconds(0, traffic(problem), _LAUNCHES)


BELOW_WIDE = "scaled"
"""The rung of batch_norm that takes what its widest one refuses."""

# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NHWC: 103 MB a tensor, three of them moved, 74 us at 4.2
# TB/s. A block a channel fetches 32 bytes for each 2: naive three times, with 64 multiprocessors' 256 loads under way
# for 1 us, 19 ms; one_pass once for the statistics, 6 ms. vectorised: the memory's pace and three launches, 80 us.
RUNGS: tuple[Rung[BatchNormTrainingProblem], ...] = (
    TwoPasses("naive", "a block a channel goes over it twice, then a thread takes an element", None, None, "naive",
              "naive"),
    TwoPasses("one_pass", "statistics in one pass (Welford, shuffles), and scales that are made once", "naive", 2.0,
              "one_pass", BELOW_WIDE),
    Wide("vectorised", "blocks share a channel's statistics, up to 16 bytes an access in both passes", "one_pass", 75.0,
         "split", "vectorised"),
)  # fmt: skip
