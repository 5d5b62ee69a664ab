"""How a convolution problem reaches a kernel: the constants and arguments that all its kernels share."""

from __future__ import annotations

from escalade.device.program import Constant, Type
from escalade.device.recipe import Argument, Buffer, Ints
from escalade.ops.conv2d.problem import Conv2dProblem

ELEMENTS = {"fp32": "float", "tf32": "float", "fp16": "__half", "bf16": "__nv_bfloat16", "fp8": "e4m3"}


def element(problem: Conv2dProblem) -> Type:
    return Type(ELEMENTS[problem.dtype])


def output_element(problem: Conv2dProblem) -> Type:
    return Type(ELEMENTS[problem.output or problem.dtype])


def epilogue_constants(problem: Conv2dProblem) -> dict[str, Constant]:
    return {"HAS_BIAS": problem.bias, "HAS_RESIDUAL": problem.residual, "HAS_RELU": problem.relu}


def shape(problem: Conv2dProblem) -> Ints:
    """`ConvShape` of kernels/common/conv_shape.cuh."""
    p = problem
    return Ints(
        (
            p.batch, p.channels, p.height, p.width, p.filters, p.filter_height, p.filter_width,
            *p.stride, *p.padding, *p.dilation, p.groups, p.output_height, p.output_width,
        )
    )  # fmt: skip


def shortcut_shape(problem: Conv2dProblem) -> Ints:
    """`ShortcutShape` of kernels/common/conv_shape.cuh."""
    return Ints((problem.shortcut_channels, *problem.shortcut_size, problem.shortcut_stride))


def tensors() -> tuple[Argument, ...]:
    """x, weight, bias, residual, y: the pointers that come first in every kernel that does the whole."""
    return (
        Buffer("x"),
        Buffer("weight"),
        Buffer("bias", optional=True),
        Buffer("residual", optional=True),
        Buffer("y"),
    )
