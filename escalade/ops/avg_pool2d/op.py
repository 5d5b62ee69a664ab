"""`avg_pool2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.ops.avg_pool2d.operation import AVG_POOL2D
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import check_images, layout_of
from escalade.ops.shared.windowed import empty_pooled

_SCHEMA = (
    "avg_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad, "
    "int divisor, str? rung=None) -> Tensor"
)


def avg_pool2d(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """The mean of every window, as `torch.nn.functional.avg_pool2d` with a positive divisor.

    The stride is the kernel unless given. NCHW and channels_last inputs are taken as they are (the result
    has x's layout), anything else is copied first. `rung` names one rung of the ladder instead of the
    chosen one.
    """
    kernel = pooling.two(kernel, "kernel")
    stride = kernel if stride is None else pooling.two(stride, "stride")
    padding = pooling.two(padding, "padding")
    return OPERATOR(
        x, kernel, stride, padding, ceil_mode, count_include_pad, pooling.divisor("avg_pool2d", divisor_override), rung
    )  # fmt: skip


def _plan(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    rung: str | None = None,
) -> Plan:
    check_images("avg_pool2d", x)
    batch, channels, height, width = x.shape
    problem = AvgPool2dProblem(
        batch, channels, height, width, (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of("avg_pool2d", x), layout_of(x),
        count_padding=count_include_pad, divisor=divisor,
    )  # fmt: skip
    return pooling.plan(AVG_POOL2D, problem, x, rung)


def _fake(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    rung: str | None = None,
) -> torch.Tensor:
    return empty_pooled("avg_pool2d", x, kernel, stride, padding, ceil_mode)


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
