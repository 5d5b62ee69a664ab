"""Constants, arguments and launches shared by the rungs of stem."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.stem.problem import StemProblem

_THREADS = 256


def shape(problem: StemProblem, row_tiles: int = 1, column_tiles: int = 1) -> Ints:
    return Ints.of("stem/shape.cuh", "StemShape", problem=problem, tiles=(row_tiles, column_tiles))


def tensors(weight: Buffer, y: Buffer, bias_optional: bool = False) -> tuple[Argument, ...]:
    """Leading arguments of every convolution kernel."""
    return (
        Buffer("x"),
        weight,
        Buffer("bias", optional=bias_optional),
        Buffer("scale", optional=True),
        Buffer("shift", optional=True),
        y,
    )


def unpooled(problem: StemProblem) -> Workspace:
    """Return the workspace of the convolution's result before pooling."""
    return Workspace("unpooled", max(1, problem.conv_elements * ELEMENT_BYTES[problem.storage]))


def pool(problem: StemProblem) -> KernelCall:
    """Return the launch that pools `unpooled` into y."""
    p = problem
    assert p.pool is not None
    vector = widest_vector(p.storage, p.filters)
    return KernelCall(
        Program.of("stem/pool.cu", problem=p, vector=vector),
        (blocks(p.output_elements, vector * _THREADS), 1, 1),
        (_THREADS, 1, 1),
        (
            Buffer("unpooled"), Buffer("y"), p.conv_height, p.conv_width, p.filters, p.output_height, p.output_width,
            *p.pool, Int64(p.output_elements),
        ),
        overlap=True,
    )  # fmt: skip


def then_pool(
    problem: StemProblem, steps: tuple[KernelCall, ...], workspaces: tuple[Workspace, ...]
) -> Recipe:
    """Append pooling as a separate launch, if there is any."""
    if problem.pool is None:
        return Recipe(steps, workspaces)
    return Recipe((*steps, pool(problem)), (*workspaces, unpooled(problem)))
