"""`avg_pool2d_backward` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.ops.avg_pool2d.op import OPERATOR as AVG_POOL2D_OPERATOR
from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.avg_pool2d_backward.operation import AVG_POOL2D_BACKWARD
from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling

_NAME = "avg_pool2d_backward"
_SCHEMA = (
    f"{_NAME}(Tensor gradient, SymInt[2] size, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, "
    "bool count_include_pad, int divisor, bool? channels_last=None, str? rung=None) -> Tensor"
)


def avg_pool2d_backward(
    gradient: torch.Tensor,
    size: int | Sequence[int],
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """The gradient of x in y = avg_pool2d(x, kernel, stride, padding), from that of y; `size` is the height and width
    of x.

    The result has the gradient's layout unless `channels_last` says which, and is the same bits every time. `rung`
    names one rung of the ladder instead of the chosen one.
    """
    kernel = pooling.two(kernel, "kernel")
    stride = kernel if stride is None else pooling.two(stride, "stride")
    return OPERATOR(
        gradient, pooling.two(size, "size"), kernel, stride, pooling.two(padding, "padding"), ceil_mode,
        count_include_pad, pooling.divisor(_NAME, divisor_override), channels_last, rung,
    )  # fmt: skip


def _plan(
    gradient: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> Plan:
    pooling.check_gradient(_NAME, gradient)
    f = AvgPool2dProblem(
        gradient.shape[0], gradient.shape[1], size[0], size[-1], (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of(_NAME, gradient),
        pooling.backward_layout(gradient, channels_last), count_padding=count_include_pad, divisor=divisor,
    )  # fmt: skip
    outputs = (f.batch, f.channels, f.output_height, f.output_width)
    return pooling.plan_backward(
        AVG_POOL2D_BACKWARD, AvgPool2dBackwardProblem(f), {"gradient": gradient}, {"gradient": outputs}, rung
    )


def _fake(
    gradient: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    pooling.check_gradient(_NAME, gradient)
    return pooling.empty_gradient(gradient, size, channels_last)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, *ctx.settings, _, _ = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """The result is linear in the gradient of y: what is asked of dx is pooled."""
    return AVG_POOL2D_OPERATOR(gradient, *ctx.settings, None), *(None,) * 9


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
