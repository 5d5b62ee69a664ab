"""How max_pool2d_backward reaches the kernels with one thread an element: what its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, KernelCall
from escalade.ops.base.grid import blocks
from escalade.ops.max_pool2d.rungs.naive import windows
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.shared import pooling


def constants(problem: MaxPool2dBackwardProblem) -> dict[str, Constant]:
    return {**pooling.constants(problem.forward), "MASK": problem.mask, "STORED": problem.stored}


def call(
    problem: MaxPool2dBackwardProblem, rung: str, buffers: tuple[Buffer, ...], elements: int, threads: int
) -> KernelCall:
    """The launch of a rung's kernel, one thread an element."""
    layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
    arguments: tuple[Argument, ...] = (*buffers, pooling.shape(problem.forward), windows(problem.forward))
    return KernelCall(
        Program.of(
            f"max_pool2d_backward/{rung}.cu", f"max_pool2d_backward_{rung}", constants(problem) | layout
        ),
        (blocks(elements, threads), 1, 1),
        (threads, 1, 1),
        arguments,
        overlap=True,
    )
