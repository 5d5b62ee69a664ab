"""One launch of clusters that keep x in registers."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.batch_statistics.rungs.statistics import RESULTS, numbers
from escalade.ops.shared import activation, channels, resident
from escalade.ops.shared.resident import ResidentConfig

_MOST_STEPS = {256: 24, 512: 12}
"""Rows of a thread that there are registers for, by the threads of a block."""
_EXCHANGES = 2


@dataclass(frozen=True)
class Resident(Rung[BatchNormTrainingProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: BatchNormTrainingProblem) -> str | None:
        return resident.refusal(self.name, problem, problem.count, self.card, _MOST_STEPS)

    def configs(self, problem: BatchNormTrainingProblem) -> tuple[Config, ...]:
        every = resident.offered(problem, problem.count, self.card, _MOST_STEPS)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: BatchNormTrainingProblem, config: Config) -> float:
        assert isinstance(config, ResidentConfig)
        return resident.estimate(problem, config, self.card, problem.bytes, _EXCHANGES)

    def recipe(self, problem: BatchNormTrainingProblem, config: Config) -> Recipe:
        assert isinstance(config, ResidentConfig)
        constants = {
            **channels.constants(problem), "HAS_RESIDUAL": problem.residual, **activation.constants_of(problem),
            "VECTOR": widest_vector(problem.dtype, problem.channels), "THREADS": config.threads,
            "COLUMNS": config.columns, "STEPS": config.steps,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_training/resident.cu", "batch_norm_training_resident", constants),
            (config.blocks, resident.slices(problem, config), 1),
            (config.threads, 1, 1),
            (
                Buffer("x"), Buffer("weight"), Buffer("bias"), Buffer("residual", optional=True), Buffer("y"), RESULTS,
                problem.channels, problem.count, *numbers(problem.statistics),
            ),
            cluster=(config.blocks, 1, 1),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# For 512 channels, 7 x 7, batch 64, fp16, 3.2 MB a tensor: three launches with 2.8 us each besides their bytes, 10 us;
# one, with two exchanges, 5 us.
RESIDENT = Resident(
    "resident", "one launch: clusters keep x in registers, and read it once", "vectorised", 2.0
)
