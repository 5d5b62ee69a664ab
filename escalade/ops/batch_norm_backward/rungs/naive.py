"""A block a channel for the sums, then an element a thread."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Addresses, Argument, Buffer, Int64, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.batch_norm_backward.problem import MASKS, BatchNormBackwardProblem
from escalade.ops.expressions import Expression
from escalade.ops.shared import channels

WEIGHT_GRADIENT, BIAS_GRADIENT = Buffer("weight_gradient"), Buffer("bias_gradient")
_BIAS = Buffer("bias", optional=True)


def constants(problem: BatchNormBackwardProblem, mask: str) -> dict[str, Constant]:
    found = {**channels.constants(problem), "MASK": MASKS.index(mask)}
    if not problem.function:
        return found
    expression = Expression.parse(problem.function)
    return {**found, "EXPRESSION_X": expression.inputs.index("x"), **expression.constants(problem.dtype)}


def sums_constants(problem: BatchNormBackwardProblem) -> dict[str, Constant]:
    """What the launch that adds up leaves open."""
    return {**constants(problem, problem.mask), "HAS_RESIDUAL": problem.residual}


def sums_arguments() -> tuple[Argument, ...]:
    """The arguments with which a launch that adds up begins."""
    return (
        Buffer("gradient"), Buffer("x"), Buffer("output", optional=True), Buffer("weight"), _BIAS, Buffer("mean"),
        Buffer("rstd"), Buffer("residual_gradient", optional=True),
    )  # fmt: skip


def apply_constants(problem: BatchNormBackwardProblem) -> dict[str, Constant]:
    """What the last launch leaves open: the residual's gradient has been through the mask."""
    return constants(problem, "none" if problem.residual else problem.mask)


def apply_arguments(problem: BatchNormBackwardProblem) -> tuple[Argument, ...]:
    """The arguments with which the last launch begins."""
    return (
        Buffer("residual_gradient" if problem.residual else "gradient"), Buffer("x"), Buffer("output", optional=True),
        Addresses((Buffer("mean"), Buffer("rstd"), Buffer("weight"), _BIAS, WEIGHT_GRADIENT, BIAS_GRADIENT)),
        Buffer("y"), 1 / problem.count, problem.channels,
    )  # fmt: skip


@dataclass(frozen=True)
class Naive(Rung[BatchNormBackwardProblem]):
    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        return None

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[Config, ...]:
        """Offers powers of two, no more of them idle than a channel's elements leave in a few warps."""
        offered = (256, 512, 1024) if problem.count > 64 else (64, 128)
        return tuple(ThreadsConfig(threads) for threads in offered)

    def recipe(self, problem: BatchNormBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        block = (config.threads, 1, 1)
        sums = KernelCall(
            Program.of(
                "batch_norm_backward/naive_sums.cu",
                "batch_norm_backward_naive_sums",
                {**sums_constants(problem), "THREADS": config.threads},
            ),
            (problem.channels, 1, 1),
            block,
            (
                *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, problem.channels, problem.pixels,
                Int64(problem.count),
            ),
            overlap=True,
        )  # fmt: skip
        apply = KernelCall(
            Program.of("batch_norm_backward/naive.cu", "batch_norm_backward_naive", apply_constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            block,
            (*apply_arguments(problem), problem.pixels, Int64(problem.elements)),
            overlap=True,
        )
        return Recipe((sums, apply))


NAIVE = Naive("naive", "a block a channel adds up, then a thread takes an element", None, None)
