"""One launch of clusters that keep the gradient and x in registers."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem
from escalade.ops.batch_norm_backward.rungs.naive import (
    BIAS_GRADIENT,
    WEIGHT_GRADIENT,
    sums_arguments,
    sums_constants,
)
from escalade.ops.shared import resident
from escalade.ops.shared.resident import ResidentConfig

_MOST_STEPS = {256: 10, 512: 4}
"""Rows of a thread that there are registers for, by the threads of a block, of two tensors."""
_EXCHANGES = 1


@dataclass(frozen=True)
class Resident(Rung[BatchNormBackwardProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        return resident.refusal(self.name, problem, problem.count, self.card, _MOST_STEPS)

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[Config, ...]:
        every = resident.offered(problem, problem.count, self.card, _MOST_STEPS)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: BatchNormBackwardProblem, config: Config) -> float:
        assert isinstance(config, ResidentConfig)
        return resident.estimate(problem, config, self.card, problem.bytes, _EXCHANGES)

    def recipe(self, problem: BatchNormBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ResidentConfig)
        constants = {
            **sums_constants(problem), "VECTOR": widest_vector(problem.dtype, problem.channels),
            "THREADS": config.threads, "COLUMNS": config.columns, "STEPS": config.steps,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/resident.cu", "batch_norm_backward_resident", constants),
            (config.blocks, resident.slices(problem, config), 1),
            (config.threads, 1, 1),
            (
                *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, Buffer("y"), 1 / problem.count, problem.channels,
                problem.count,
            ),
            cluster=(config.blocks, 1, 1),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# For 512 channels, 7 x 7, batch 64, fp16, 3.2 MB a tensor: three launches with 2.8 us each besides their bytes, 10.7
# us; one, with an exchange, 5 us.
RESIDENT = Resident(
    "resident",
    "one launch: clusters keep the gradient and x in registers, and read them once",
    "vectorised",
    2.0,
)
