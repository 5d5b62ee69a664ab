"""The rungs of quantise: an element a thread, and 16 bytes an access."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES, VECTOR_BYTES, element
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import ALL_ARCHITECTURES, Config, Rung, ThreadsConfig
from escalade.ops.quantise.problem import QuantiseProblem
from escalade.ops.shared.pointwise import PacksConfig

ARCHITECTURES = tuple(name for name in ALL_ARCHITECTURES if name not in ("sm_80", "sm_86"))
"""The older ones have no conversion to e4m3."""


@dataclass(frozen=True)
class _Quantiser(Rung[QuantiseProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ARCHITECTURES

    def supports(self, problem: QuantiseProblem) -> str | None:
        return None


@dataclass(frozen=True)
class Naive(_Quantiser):
    def configs(self, problem: QuantiseProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 128))

    def recipe(self, problem: QuantiseProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        constants: dict[str, Constant] = {"Element": element(problem.dtype)}
        program = Program.of("quantise/naive.cu", "quantise_naive", constants)
        return _launch(problem, program, blocks(problem.elements, config.threads), config.threads)


@dataclass(frozen=True)
class Vectorised(_Quantiser):
    def configs(self, problem: QuantiseProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        fits = (config for config in every if _vector_blocks(problem, config) >= self.card.filling)
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: QuantiseProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        constants: dict[str, Constant] = {
            "Element": element(problem.dtype),
            "PACKS": config.packs,
            "THREADS": config.threads,
        }
        program = Program.of("quantise/vectorised.cu", "quantise_vectorised", constants)
        return _launch(problem, program, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: QuantiseProblem, config: PacksConfig) -> int:
    vector = VECTOR_BYTES // ELEMENT_BYTES[problem.dtype]
    return blocks(problem.elements // vector, config.threads * config.packs)


def _launch(problem: QuantiseProblem, program: Program, grid: int, threads: int) -> Recipe:
    arguments = (Buffer("x"), Buffer("factor"), Buffer("y"), Int64(problem.elements))
    return Recipe((KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments, overlap=True),))


# Predictions are for 51,380,224 elements in fp16, 154 MB to move: 36 us at 4.24 TB/s. An element a thread has at
# most 2,048 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us.
RUNGS: tuple[Rung[QuantiseProblem], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised(
        "vectorised", "16 bytes a load, several under way in a thread, converted in pairs", "naive", 3.5
    ),
)
