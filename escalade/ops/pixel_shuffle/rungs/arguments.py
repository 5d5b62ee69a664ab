"""How pixel_shuffle reaches a kernel: the constants and arguments that its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer, Ints
from escalade.ops.base.dtypes import element
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem


def constants(problem: PixelShuffleProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype), "DOWN": problem.down, "FACTOR": problem.factor}


def passed(problem: PixelShuffleProblem) -> tuple[Argument, ...]:
    """The buffers, and `Shuffle` of kernels/pixel_shuffle/shuffle.cuh."""
    p = problem
    x_step, y_step = p.x_pitch or p.channels, p.y_pitch or p.output_channels
    few, many = (x_step, y_step) if p.down else (y_step, x_step)
    return Buffer("x"), Buffer("y"), Ints((p.batch, p.few_channels, *p.small, few, many))
