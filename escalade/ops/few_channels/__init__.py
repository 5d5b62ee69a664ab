"""Convolution of few channels with ReLU and pooling: the operation with its ladder, and the PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import MULTIPLIED, STORAGE, multiplied_as
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.calling.call import CallPlan, packer
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.few_channels import cuda_core, matrix, tensor_core
from escalade.ops.few_channels.problem import (
    SOURCES,
    FewChannelsProblem,
    check_counts,
    empty_output,
    exact,
    peer,
    random_inputs,
)
from escalade.ops.shared.images import LAYOUTS, empty_images_like, layout_of, shape_of
from escalade.ops.shared.pooling import as_pair


class FewChannelsOperation(Operation[FewChannelsProblem]):
    name = "few_channels"
    problem = FewChannelsProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("few_channels", (*matrix.RUNGS, cuda_core.DIRECT, cuda_core.ROWS, *tensor_core.RUNGS))
    problems = tuple(
        FewChannelsProblem.parse(name)
        for name in (
            "1to4_86_k7_b10000",
            "4to16_40_k7_b10000",
            "1to4_86_k7_b10000_relu_pool2",
            "4to16_40_k7_b10000_relu_pool4c",
        )
    )
    """Both convolutions of a LeNet at batch 10,000, without and with ReLU and pooling."""
    small_problems = tuple(
        FewChannelsProblem.parse(name)
        for name in (
            "1to4_18_k7_b3",
            "4to16_13x15_k7_b2_relu_pool4c",
            "1to4_17x22_k7_b2_relu_pool2",
            "3to5_9x14_k5x3p2x1_b3_bias_relu",
            "3to5_11x10_k5x3_b2_uint8_bias_pool3c",
            "2to8_12_k3p1_b1_uint8_relu_pool2",
            "8to32_7x9_k3p1_b2_bias_pool3",
            "1to1_5x40_k1x9p0x4_b1",
            "5to17_6_k2_b2_relu_pool2c",
        )
    )
    """Tested on the twin: numbers of channels of every kind, odd sizes, padding, bias, uint8, incomplete windows."""
    dtypes = MULTIPLIED
    layouts = LAYOUTS
    order = ("pooled", "images_a_tile", "split_halves", "rows", "direct", "matrix_unroll")


FEW_CHANNELS = FewChannelsOperation()


# --- the PyTorch operator


_SOURCES = {STORAGE[name]: name for name in SOURCES}


def few_channels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    padding: int | Sequence[int] = 0,
    relu: bool = False,
    pool: int = 1,
    ceil_mode: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return max_pool2d(relu(conv2d(x, weight, bias, padding=padding)), pool, ceil_mode=ceil_mode) for up to 8
    channels.

    bias, relu and pooling are optional. x has the weights' dtype, float32 or uint8 (used unscaled); the result has the
    weights' dtype and x's layout. `tf32` allows TF32 products for fp32 weights; `rung` selects a rung of the ladder by
    name.
    """
    return OPERATOR(x, weight, bias, as_pair(padding, "padding"), relu, pool, ceil_mode, tf32, rung)


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    padding: Pair = (0, 0),
    relu: bool = False,
    pool: int = 1,
    ceil_mode: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    filters, channels, rows, columns = weight.shape
    check_counts(channels, filters)
    if pool < 1:
        raise UnsupportedError(f"pooling window of {pool}: it must be at least 1")
    more = pool - 1 if ceil_mode else 0
    size = [(x.shape[2 + d] + 2 * padding[d] - weight.shape[2 + d] + 1 + more) // pool for d in (0, 1)]
    return CallPlan(
        FEW_CHANNELS,
        lambda: empty_images_like(x, (x.shape[0], filters, *size), weight.dtype),
        lambda: FewChannelsProblem(
            *shape_of(x), filters, rows, columns, padding, bias is not None, relu, pool, ceil_mode,
            multiplied_as(weight, tf32), layout_of(x), _SOURCES[x.dtype],
        ),
        {"weight": packer("flat")},
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate with PyTorch, which recomputes the convolution: storing its result would undo the fusion."""
    x, weight, bias = ctx.saved_tensors
    padding, relu, pool, ceil_mode = ctx.settings[:4]
    wide = x.to(weight.dtype)
    # Trailing arguments left at their defaults are omitted here too.
    need_x, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    y = torch.ops.aten.conv2d(wide, weight, bias, [1, 1], padding)
    if relu:
        y = torch.ops.aten.relu(y)
    if pool > 1:
        window = ([pool, pool], [pool, pool], [0, 0], [1, 1], ceil_mode)
        _, indices = torch.ops.aten.max_pool2d_with_indices(y, *window)
        gradient = torch.ops.aten.max_pool2d_with_indices_backward(gradient, y, *window, indices)
    if relu:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        gradient, wide, weight, None if bias is None else [bias.shape[0]], [1, 1], padding, [1, 1], False,
        [0, 0], 1, [need_x, need_weight, bias is not None and need_bias],
    )  # fmt: skip
    grad_x = grad_x.to(x.dtype) if need_x else None
    return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


OPERATOR = define_planned(
    "few_channels", _plan, "x: N C H W of weight|float32|uint8, weight: K C R S of floating, bias: K of weight",
    setup=_setup, backward=_backward,
)  # fmt: skip

__all__ = ["FEW_CHANNELS", "FewChannels", "FewChannelsProblem", "few_channels"]
