"""Normalisation with known statistics: the rungs of batch_norm."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import pitched_roles, pitches, unsupported_pitch
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.batch_norm.problem import BatchNormProblem
from escalade.ops.shared import activation, channels, pointwise
from escalade.ops.shared.channels import Rows, channels_innermost
from escalade.ops.shared.pointwise import ElementAThread

_MOST_TURNS = 4
START_US = 1.3
"""Microseconds from a launch to the first results, besides its own: four statistics of every channel are read and made
into two. By the batch norms of DenseNet-121 from 28 pixels in the square on."""
_X, _Y = Buffer("x"), Buffer("y")
_RESIDUAL = Buffer("residual", optional=True)


@dataclass(frozen=True)
class PacksConfig(pointwise.PacksConfig):
    turns: int = 1
    """How often a thread does so with the same channels (rows of channels only)."""
    backwards: bool = False
    """Whether the last rows come first, behind a launch that has read the first ones first (rows of channels only)."""


def _constants(problem: BatchNormProblem) -> dict[str, Constant]:
    return {
        **channels.constants(problem),
        "HAS_RESIDUAL": problem.residual,
        **activation.constants_of(problem),
    }


@dataclass(frozen=True)
class Naive(ElementAThread[BatchNormProblem]):
    """An element a thread, everything anew for each."""

    def recipe(self, problem: BatchNormProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        call = KernelCall(
            Program.of("batch_norm/naive.cu", "batch_norm_naive", _constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            _array_arguments(problem),
            overlap=True,
        )
        return Recipe((call,))


def _array_arguments(problem: BatchNormProblem) -> tuple[Argument, ...]:
    """The arguments of the kernels that see one long array."""
    return (
        _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
        float(problem.epsilon), problem.channels, problem.pixels, Int64(problem.elements),
    )  # fmt: skip


@dataclass(frozen=True)
class Scaled(ElementAThread[BatchNormProblem]):
    """An element a thread, after a launch that makes the scales."""

    def recipe(self, problem: BatchNormProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        block = (config.threads, 1, 1)
        scale = KernelCall(
            Program.of("batch_norm/scaled_prepare.cu", "batch_norm_scaled_prepare"),
            (blocks(problem.channels, config.threads), 1, 1),
            block,
            (Buffer("weight"), Buffer("variance"), Buffer("scale"), float(problem.epsilon), problem.channels),
            overlap=True,
        )
        apply = KernelCall(
            Program.of("batch_norm/scaled.cu", "batch_norm_scaled", _constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            block,
            (
                _X, Buffer("scale"), Buffer("bias"), Buffer("mean"), _RESIDUAL, _Y,
                problem.channels, problem.pixels, Int64(problem.elements),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((scale, apply), (Workspace("scale", 4 * problem.channels),))


@dataclass(frozen=True)
class Vectorised(Rung[BatchNormProblem]):
    """A thread takes up to 16 bytes an access; the scales are made where they are used."""

    def supports(self, problem: BatchNormProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may lie in two planes, not in more, and these have {problem.pixels}; "
                "the rung `scaled` takes any"
            )
        return unsupported_pitch(self.name, problem, pitched_roles(BatchNormProblem))

    def configs(self, problem: BatchNormProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round, then as many turns."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1)]
        if channels_innermost(problem):
            every += [PacksConfig(256, packs, turns) for packs in (4, 2) for turns in (2, 4, 8)]
        default = next((c for c in every if _pieces(problem, c) >= self.card.filling), PacksConfig(packs=1))
        if channels_innermost(problem):
            spare = _pieces(problem, default) // (2 * self.card.filling)
            default = PacksConfig(default.threads, default.packs, max(1, min(spare, _MOST_TURNS)))
        return (default, *(config for config in every if config != default))

    def estimate(self, problem: BatchNormProblem, config: Config) -> float:
        return START_US + self.card.microseconds(0, traffic(problem))

    def recipe(self, problem: BatchNormProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        call = _over_rows if channels_innermost(problem) else _over_planes
        return Recipe((call(problem, config),))


def _pieces(problem: BatchNormProblem, config: PacksConfig) -> int:
    """Blocks, were each to do one turn."""
    if not channels_innermost(problem):
        return blocks(problem.elements // full_vector(problem.dtype), config.threads * config.packs)
    rows = Rows.of(problem, config.threads)
    return blocks(problem.batch * problem.pixels, rows.height * config.packs) * rows.across


def _over_rows(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    rows = Rows.of(problem, config.threads)
    constants = {
        **_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
        "PITCHED": bool(pitches(problem)), "BACKWARDS": config.backwards,
    }  # fmt: skip
    count = problem.batch * problem.pixels
    return KernelCall(
        Program.of("batch_norm/vectorised_rows.cu", "batch_norm_vectorised_rows", constants),
        (blocks(count, rows.height * config.packs * config.turns), rows.across, 1),
        (config.threads, 1, 1),
        (
            _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
            float(problem.epsilon), problem.channels, rows.width, Int64(count), config.turns,
            *(pitch or problem.channels for pitch in (problem.x_pitch, problem.residual_pitch, problem.y_pitch)),
        ),
        overlap=True,
    )  # fmt: skip


def _over_planes(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    vector = full_vector(problem.dtype)
    constants = {
        **_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
        "STRADDLING": problem.pixels % vector != 0,
    }  # fmt: skip
    return KernelCall(
        Program.of("batch_norm/vectorised_planes.cu", "batch_norm_vectorised_planes", constants),
        (_pieces(problem, config), 1, 1),
        (config.threads, 1, 1),
        _array_arguments(problem),
        overlap=True,
    )


# Predictions are for 64 channels, 56 x 56, batch 256, fp16: 51.4 M elements, 206 MB, 49 us at 4.24 TB/s. 132 SMs issue
# 2.9e13 instructions of a thread in a second. naive: about 80 an element (two divisions for the channel, a square root,
# a division), 142 us; scaled: about 50, 90 us and a launch; vectorised: at the memory's pace, 52 us.
RUNGS: tuple[Rung[BatchNormProblem], ...] = (
    Naive("naive", "an element a thread, with a square root and a division for each", None, None),
    Scaled("scaled", "weight / sqrt(variance + epsilon) is made once a channel", "naive", 1.5),
    Vectorised("vectorised", "up to 16 bytes an access, several under way in a thread", "scaled", 1.7),
)
