"""How convert reaches a kernel: the constants, arguments and refusals that its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer
from escalade.ops.base.dtypes import element
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


def unsupported_padding(problem: ConvertProblem) -> str | None:
    if problem.layout == "nchw" and problem.padded_channels != problem.channels:
        return (
            f"an nchw target is not padded, but {problem.padded_channels} channels are asked for of "
            f"{problem.channels}; what an nhwc source stores is stored_channels"
        )
    return None
