"""How max_pool2d reaches a kernel: the constants, arguments and refusals that its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.shared import pooling


def constants(problem: MaxPool2dProblem) -> dict[str, Constant]:
    p = problem
    return {
        **pooling.constants(p),
        "KERNEL_H": p.kernel[0],
        "KERNEL_W": p.kernel[1],
        "STRIDE_H": p.stride[0],
        "STRIDE_W": p.stride[1],
        "PAD_H": p.padding[0],
        "PAD_W": p.padding[1],
    }
