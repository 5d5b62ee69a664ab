"""Constants and arguments shared by the kernels of linear."""

from __future__ import annotations

from escalade.device.recipe import Argument, Buffer
from escalade.ops.linear.problem import LinearProblem


def refuses_pixels(rung: str, problem: LinearProblem) -> str | None:
    """Return why a rung without pooling does not support the problem."""
    if problem.pixels == 1:
        return None
    return f"{rung} does not support means over pixels; pool_first does"


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
