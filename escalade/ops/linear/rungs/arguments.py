"""How a fully connected layer reaches a kernel: the constants and arguments that its kernels share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer
from escalade.ops.base.dtypes import element
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.shared import activation


def refuses_pixels(rung: str, problem: LinearProblem) -> str | None:
    """What most rungs say to the mean over pixels."""
    if problem.pixels == 1:
        return None
    return f"{rung} takes rows as they are, not means over pixels; pool_first does both"


def constants(problem: LinearProblem) -> dict[str, Constant]:
    return {
        "Element": element(problem.dtype),
        "HAS_BIAS": problem.bias,
        **activation.constants_of(problem),
    }


def launch_arguments(problem: LinearProblem, output: str = "y") -> tuple[Argument, ...]:
    return (
        Buffer("x"),
        Buffer("weight"),
        Buffer("bias", optional=True),
        Buffer(output),
        problem.batch,
        problem.in_features,
        problem.out_features,
    )
