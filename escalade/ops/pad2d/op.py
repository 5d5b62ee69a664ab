"""`pad2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.pad2d.operation import PAD2D
from escalade.ops.pad2d.problem import Pad2dProblem
from escalade.ops.pad2d.reference import padded
from escalade.ops.shared import pooling
from escalade.ops.shared.images import check_images, empty_beside, layout_of

_SCHEMA = "pad2d(Tensor x, int[4] pads, str mode, float value, str? rung=None) -> Tensor"


def pad2d(
    x: torch.Tensor,
    pads: Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """An image with so many rows above and below and columns to the left and right, as `torch.nn.functional.pad`.

    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    if not isinstance(pads, Sequence) or len(pads) != 4:
        raise UnsupportedError(f"pads of {pads!r}: they are four, above, below, to the left and to the right")
    return OPERATOR(x, tuple(pads), mode, value, rung)


def _plan(x: torch.Tensor, pads: Sequence[int], mode: str, value: float, rung: str | None = None) -> Plan:
    check_images("pad2d", x)
    batch, channels, height, width = x.shape
    top, bottom, left, right = pads
    problem = Pad2dProblem(
        batch, channels, height, width, (top, bottom, left, right), mode, value, dtype_of("pad2d", x), layout_of(x)
    )  # fmt: skip
    return pooling.plan(PAD2D, problem, x, rung)


def _fake(
    x: torch.Tensor, pads: Sequence[int], mode: str, value: float, rung: str | None = None
) -> torch.Tensor:
    check_images("pad2d", x)
    height, width = x.shape[2] + pads[0] + pads[1], x.shape[3] + pads[2] + pads[3]
    return empty_beside(x, (x.shape[0], x.shape[1], height, width))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, *ctx.settings, _ = inputs
    ctx.save_for_backward(x)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """PyTorch's own: padding is linear, and of x only the shape counts."""
    (x,) = ctx.saved_tensors
    pads, mode, value = ctx.settings
    with torch.enable_grad():
        shape = torch.zeros_like(x, requires_grad=True)
        (grad_x,) = torch.autograd.grad(padded(shape, tuple(pads), mode, value), shape, gradient)
    return grad_x, None, None, None, None


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
