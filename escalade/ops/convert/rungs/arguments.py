"""How convert reaches a kernel: the constants, arguments and refusals that its rungs share."""

from __future__ import annotations

from collections.abc import Collection

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer
from escalade.ops.base.dtypes import element
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.convert.problem import ConvertProblem

TENSORS: tuple[Argument, ...] = (
    Buffer("x"),
    Buffer("scale", optional=True),
    Buffer("shift", optional=True),
    Buffer("y"),
)


def constants(problem: ConvertProblem) -> dict[str, Constant]:
    return {
        "Source": element(problem.source),
        "Target": element(problem.dtype),
        "SOURCE_NHWC": problem.source_layout == "nhwc",
        "TARGET_NHWC": problem.layout == "nhwc",
        "NORMALISE": problem.normalise,
    }


def unsupported(
    rung: str, problem: ConvertProblem, takes: Collection[str] = (), takes_ways: bool = False
) -> str | None:
    """What no rung does, and buffers apart other than those that it takes so."""
    if problem.layout == "nchw" and problem.padded_channels != problem.channels:
        return (
            f"an nchw target is not padded, but {problem.padded_channels} channels are asked for of "
            f"{problem.channels}; what an nhwc source stores is stored_channels"
        )
    if problem.ways > 1 and not takes_ways:
        return f"{rung} leaves channels in their order; here they are dealt out of {problem.ways} ways"
    return unsupported_pitch(rung, problem, takes)
