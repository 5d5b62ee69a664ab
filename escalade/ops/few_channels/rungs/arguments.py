"""Constants, arguments and launches shared by the rungs of few_channels."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.shared import activation

MOST_FILTER_WIDTH = 16
"""Widest filter: a thread keeps that much of a row besides its run in registers."""
_THREADS = 256


def shape(problem: FewChannelsProblem) -> Ints:
    return Ints.of("few_channels/shape.cuh", "FewChannelsShape", problem=problem)


def tensors(y: Buffer) -> tuple[Argument, ...]:
    """Leading arguments of every convolution kernel."""
    return (Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), y)


def needs_finish(problem: FewChannelsProblem) -> bool:
    """Return True if a separate launch must apply activation or pooling, where the convolution's kernel does
    neither."""
    return problem.relu or bool(problem.activation) or problem.pool > 1


def unfinished(problem: FewChannelsProblem, name: str = "unfinished") -> Workspace:
    """Return the workspace of the convolution's result before activation and pooling."""
    return Workspace(name, max(1, problem.conv_elements * ELEMENT_BYTES[problem.storage]))


def finish(
    problem: FewChannelsProblem, source: str = "unfinished", offset: int = 0, lane: int = 0
) -> KernelCall:
    """Return the launch of activation and pooling, from the workspace to y at byte `offset`."""
    p = problem
    vector = widest_vector(p.storage, p.filters) if p.layout == "nhwc" else 1
    return KernelCall(
        Program.of("few_channels/pool.cu", constants=activation.constants_of(p), problem=p, vector=vector),
        (blocks(p.output_elements, vector * _THREADS), 1, 1),
        (_THREADS, 1, 1),
        (
            Buffer(source), Buffer("y", offset), p.conv_height, p.conv_width, p.filters, p.output_height,
            p.output_width, Int64(p.output_elements),
        ),
        overlap=True,
        lane=lane,
    )  # fmt: skip


def then_finish(
    problem: FewChannelsProblem, steps: tuple[KernelCall, ...], workspaces: tuple[Workspace, ...] = ()
) -> Recipe:
    """Append activation and pooling as a separate launch, if there are any."""
    if not needs_finish(problem):
        return Recipe(steps, workspaces)
    return Recipe((*steps, finish(problem)), (*workspaces, unfinished(problem)))


def pools_before(name: str, problem: FewChannelsProblem) -> str | None:
    """Return why a rung that pools before the activation does not support one that is not monotonic."""
    if problem.activation and problem.pool > 1:
        return f"{name} pools before the activation, which must be ReLU then; `direct` pools after any activation"
    return None


def too_wide(name: str, problem: FewChannelsProblem) -> str | None:
    if problem.filter_width > MOST_FILTER_WIDTH:
        return (
            f"{name} takes filters up to {MOST_FILTER_WIDTH} wide, not {problem.filter_width}; `matrix_unroll` "
            "takes any"
        )
    return None
