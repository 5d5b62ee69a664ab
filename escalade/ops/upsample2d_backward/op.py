"""`upsample2d_backward` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling
from escalade.ops.upsample2d.op import OPERATOR as UPSAMPLE2D_OPERATOR
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d_backward.operation import UPSAMPLE2D_BACKWARD
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

_NAME = "upsample2d_backward"
_SCHEMA = (
    f"{_NAME}(Tensor gradient, SymInt[2] size, str mode, bool corners, float[2] factors, bool? channels_last=None, "
    "str? rung=None) -> Tensor"
)


def upsample2d_backward(
    gradient: torch.Tensor,
    size: int | Sequence[int],
    mode: str = "nearest",
    *,
    align_corners: bool = False,
    factors: tuple[float, float] = (0.0, 0.0),
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """The gradient of x in y = upsample2d(x, ...), from that of y; `size` is the height and width of x.

    The result has the gradient's layout unless `channels_last` says which, and is the same bits every time. `rung`
    names one rung of the ladder instead of the chosen one.
    """
    return OPERATOR(gradient, pooling.two(size, "size"), mode, align_corners, factors, channels_last, rung)


def _plan(
    gradient: torch.Tensor,
    size: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    channels_last: bool | None = None,
    rung: str | None = None,
) -> Plan:
    pooling.check_gradient(_NAME, gradient)
    batch, channels, output_height, output_width = gradient.shape
    forward = Upsample2dProblem(
        batch, channels, size[0], size[-1], (output_height, output_width), mode, align_corners,
        (factors[0], factors[-1]), dtype_of(_NAME, gradient), pooling.backward_layout(gradient, channels_last),
    )  # fmt: skip
    sizes = {"gradient": tuple(gradient.shape)}
    return pooling.plan_backward(
        UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem(forward), {"gradient": gradient}, sizes, rung
    )


def _fake(
    gradient: torch.Tensor,
    size: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    pooling.check_gradient(_NAME, gradient)
    return pooling.empty_gradient(gradient, size, channels_last)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gradient, _, *ctx.settings, _, _ = inputs
    ctx.output = gradient.shape[2:]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """The result is linear in the gradient of y: what is asked of dx is brought to the size of y."""
    return UPSAMPLE2D_OPERATOR(gradient, ctx.output, *ctx.settings, None), *(None,) * 6


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
