"""How a convolution problem reaches a kernel: the constants and arguments that all its kernels share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer, Ints
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation


def epilogue_constants(problem: Conv2dProblem) -> dict[str, Constant]:
    return {
        "HAS_BIAS": problem.bias,
        "HAS_RESIDUAL": problem.residual,
        **activation.constants_of(problem),
    }


def shape(problem: Conv2dProblem) -> Ints:
    """`ConvShape` of kernels/common/conv_shape.cuh."""
    return _shape(problem, problem.channels, problem.filters)


def _shape(p: Conv2dProblem, channels: int, filters: int) -> Ints:
    return Ints(
        (
            p.batch, channels, p.height, p.width, filters, p.filter_height, p.filter_width,
            *p.stride, *p.padding, *p.dilation, p.groups, p.output_height, p.output_width,
        )
    )  # fmt: skip


def group_shape(problem: Conv2dProblem) -> Ints:
    """`ConvShape` with the channels and filters of one group, for kernels with GROUPED; the same if there is one."""
    return _shape(problem, problem.group_channels, problem.group_filters)


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
