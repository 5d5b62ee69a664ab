"""How a convolution of few channels reaches its kernels: the constants, arguments and launches that its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.shared import activation

MOST_FILTER_WIDTH = 16
"""A thread has that much of a row, and its run, in registers."""
_THREADS = 256


def constants(problem: FewChannelsProblem) -> dict[str, Constant]:
    """What kernels/few_channels/shape.cuh leaves open."""
    return {
        "Source": element(problem.x_type),
        "Element": element(problem.storage),
        "NHWC": problem.layout == "nhwc",
        "CHANNELS": problem.channels,
        "HAS_BIAS": problem.bias,
    }


def shape(problem: FewChannelsProblem) -> Ints:
    """`FewChannelsShape` of kernels/few_channels/shape.cuh."""
    p = problem
    return Ints(
        (
            p.batch, p.height, p.width, p.filters, p.filter_height, p.filter_width, *p.padding, p.conv_height,
            p.conv_width, p.output_height, p.output_width,
        )
    )  # fmt: skip


def tensors(y: Buffer) -> tuple[Argument, ...]:
    """The pointers that come first in every kernel that convolves."""
    return (Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), y)


def finishes_apart(problem: FewChannelsProblem) -> bool:
    """Whether an activation or pooling is left for a launch of its own, where the convolution's kernel does neither."""
    return problem.relu or bool(problem.activation) or problem.pool > 1


def unfinished(problem: FewChannelsProblem, name: str = "unfinished") -> Workspace:
    """The result of the convolution, for a launch of its own to finish."""
    return Workspace(name, max(1, problem.conv_elements * ELEMENT_BYTES[problem.storage]))


def finish(
    problem: FewChannelsProblem, source: str = "unfinished", offset: int = 0, lane: int = 0
) -> KernelCall:
    """The activation and pooling, from the workspace to y, `offset` bytes into it."""
    p = problem
    vector = widest_vector(p.storage, p.filters) if p.layout == "nhwc" else 1
    return KernelCall(
        Program.of(
            "few_channels/pool.cu",
            "few_channels_pool",
            {
                "Element": element(p.storage),
                "NHWC": p.layout == "nhwc",
                "VECTOR": vector,
                "POOL": p.pool,
                **activation.constants_of(p),
            },
        ),
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
    """The activation and pooling by a launch of their own, if there are any."""
    if not finishes_apart(problem):
        return Recipe(steps, workspaces)
    return Recipe((*steps, finish(problem)), (*workspaces, unfinished(problem)))


def pools_before(name: str, problem: FewChannelsProblem) -> str | None:
    """What rungs that pool first, and then activate one result for each window, say of what does not ascend."""
    if problem.activation and problem.pool > 1:
        return f"{name} pools in front of ReLU, which comes to the same; `direct` pools behind any activation"
    return None


def too_wide(name: str, problem: FewChannelsProblem) -> str | None:
    if problem.filter_width > MOST_FILTER_WIDTH:
        return (
            f"{name} takes filters up to {MOST_FILTER_WIDTH} wide, not {problem.filter_width}; `matrix_unroll` "
            "takes any"
        )
    return None
