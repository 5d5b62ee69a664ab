"""Several packs a thread, a partial sum a block: the rungs of pointwise_loss."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import element, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem
from escalade.ops.shared.losses import loss_buffer
from escalade.ops.shared.pointwise import PacksConfig

_PARTIALS, _TICKETS = Buffer("partials"), Buffer("tickets")
_PARTIAL_BYTES, _TICKET_BYTES = 4, 4


@dataclass(frozen=True)
class Packs(Rung[PointwiseLossProblem]):
    wide: bool
    """Whether an access has 16 bytes, or one element."""

    def supports(self, problem: PointwiseLossProblem) -> str | None:
        return None

    def configs(self, problem: PointwiseLossProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1)]
        fits = (config for config in every if self._blocks(problem, config) >= self.card.filling)
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: PointwiseLossProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        count, program = self._blocks(problem, config), problem.program
        constants: dict[str, Constant] = {
            **program.constants(problem.dtype), "INPUTS": Macro(", ".join(program.inputs)),
            "Element": element(problem.dtype), "Target": element(problem.target_dtype),
            "HAS_GRADIENT": problem.gradient, "VECTOR": self._vector(problem), "PACKS": config.packs,
            "THREADS": config.threads,
        }  # fmt: skip
        call = KernelCall(
            Program.of("pointwise_loss/packs.cu", "pointwise_loss_packs", constants),
            (count, 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"), Buffer("target"), Buffer("scale", optional=True),
                Buffer("y" if problem.gradient else "", optional=True), _PARTIALS, _TICKETS,
                Buffer(loss_buffer(problem)), Int64(problem.elements), problem.factor,
            ),
            overlap=True,
        )  # fmt: skip
        meeting = Workspace(_TICKETS.name, _TICKET_BYTES, zeroed=True)
        return Recipe((call,), (Workspace(_PARTIALS.name, count * _PARTIAL_BYTES), meeting))

    def _vector(self, problem: PointwiseLossProblem) -> int:
        """Elements of an access, which has at most 16 bytes of either tensor."""
        return min(full_vector(problem.dtype), full_vector(problem.target_dtype)) if self.wide else 1

    def _blocks(self, problem: PointwiseLossProblem, config: PacksConfig) -> int:
        return blocks(problem.elements // self._vector(problem), config.threads * config.packs)


# Predictions are for the error of 2^25 elements in fp16 without a gradient: 134 MB, 32 us at the rate of a copy. With 2
# bytes an access a multiprocessor's 2,048 threads have 32 KiB of four packs of both tensors under way, which memory
# answers in 0.7 us: as many as it takes, but four times the instructions.
RUNGS: tuple[Rung[PointwiseLossProblem], ...] = (
    Packs("single", "an element an access, several under way in a thread", None, None, wide=False),
    Packs("vectorised", "16 bytes an access", "single", 1.8, wide=True),
)
