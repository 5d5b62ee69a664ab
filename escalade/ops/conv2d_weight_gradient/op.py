"""`conv2d_weight_gradient` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from escalade.device.cuda import architecture_of
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import multiplied_as
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient.operation import CONV2D_WEIGHT_GRADIENT
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA, WGMMA_GROUPS
from escalade.ops.conv2d_weight_gradient.rungs.tensor_core import TENSOR_CORE
from escalade.ops.shared import pooling
from escalade.ops.shared.images import empty_images_like, form_of, layout_of, shape_of
from escalade.ops.shared.pooling import as_pair

Gradients = tuple[torch.Tensor, torch.Tensor]
_ON_TENSOR_CORES = (WGMMA, WGMMA_GROUPS, FEW_CHANNELS, SKINNY, TENSOR_CORE, WGMMA_SPLIT)


def conv2d_weight_gradient(
    x: torch.Tensor,
    gradient: torch.Tensor,
    filter_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of a convolution's weights and bias (None unless `bias`) from x and the gradient of its
    result.

    Shapes are PyTorch's: x [N, C, H, W], gradient [N, K, P, Q], weights [K, C/groups, R, S] for a `filter_size` of (R,
    S), in the layout of x. Accumulators are fp32, and results are deterministic. `tf32` allows TF32 products for fp32
    tensors; `rung` selects a rung of the ladder by name.
    """
    of_weight, of_bias = OPERATOR(
        x, gradient, as_pair(filter_size, "filter_size"), as_pair(stride, "stride"), as_pair(padding, "padding"),
        as_pair(dilation, "dilation"), groups, bias, tf32, rung,
    )  # fmt: skip
    return of_weight, of_bias if bias else None


def is_on_tensor_cores(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
    tf32: bool,
) -> bool:
    """Return True if a tensor-core rung supports these weights; otherwise PyTorch is faster.

    Image and batch sizes are not read: they may be symbolic during tracing.
    """
    sizes = tuple(map(int, weight.shape))
    settings = (tuple(stride), tuple(padding), tuple(dilation), groups)
    return _on_tensor_cores(sizes, *settings, multiplied_as(x, tf32), layout_of(x), bias, x.device)


@lru_cache(maxsize=1024)
def _on_tensor_cores(
    sizes: tuple[int, ...],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    dtype: str,
    layout: str,
    bias: bool,
    device: torch.device,
) -> bool:
    filters, group_channels, filter_height, filter_width = sizes
    # Smallest image that the filter fits into: its windows have the same corners, relative to either side.
    alike = Conv2dProblem(
        1, group_channels * groups, dilation[0] * (filter_height - 1) + 1, dilation[1] * (filter_width - 1) + 1,
        filters, filter_height, filter_width, stride, padding, dilation, groups, dtype, layout, bias,
    )  # fmt: skip
    problem, here = Conv2dWeightGradientProblem(alike), architecture_of(device)
    rungs = (rung for rung in _ON_TENSOR_CORES if here is None or here in rung.architectures)
    return not all(rung.supports(problem) for rung in rungs)


def _plan(
    x: torch.Tensor,
    gradient: torch.Tensor,
    filter_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    bias: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    channels, filters = x.shape[1], gradient.shape[1]
    if groups < 1 or channels % groups or filters % groups:
        raise UnsupportedError(
            f"{channels} channels and {filters} filters cannot be split into {groups} groups"
        )

    def problem() -> Conv2dWeightGradientProblem:
        settings = (stride, padding, dilation, groups)
        rows, columns = filter_size
        f = Conv2dProblem(*shape_of(x), filters, rows, columns, *settings, *form_of(x, tf32), bias)
        pooling.check_gradients(f, {}, gradient=gradient)
        return Conv2dWeightGradientProblem(f)

    return CallPlan(
        CONV2D_WEIGHT_GRADIENT,
        lambda: {
            "y": empty_images_like(x, (filters, channels // groups, *filter_size)),
            "bias_gradient": x.new_empty(filters if bias else 0),
        },
        problem,
        fill=_zeroed,
    )


def _zeroed(gradients: Gradients) -> Gradients:
    """Return the gradients for an empty batch."""
    return gradients[0].zero_(), gradients[1].zero_()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    x, gradient, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, ctx.bias, *_ = inputs
    ctx.save_for_backward(x, gradient)


def _backward(ctx: Any, of_weight: torch.Tensor, of_bias: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate by x and gradient with PyTorch's own convolutions; the result is linear in each."""
    x, gradient = ctx.saved_tensors
    need_x, need_gradient = ctx.needs_input_grad[:2]
    settings = (ctx.stride, ctx.padding, ctx.dilation)
    grad_x = grad_gradient = None
    if need_x:
        grad_x, _, _ = torch.ops.aten.convolution_backward(
            gradient, x, of_weight, None, *settings, False, [0, 0], ctx.groups, [True, False, False]
        )
    if need_gradient:
        grad_gradient = torch.conv2d(x, of_weight, of_bias if ctx.bias else None, *settings, ctx.groups)
    return grad_x, grad_gradient, *(None for _ in ctx.needs_input_grad[2:])


OPERATOR = define_planned(
    "conv2d_weight_gradient", _plan, "x: N C H W, gradient: N K P Q",
    returns="(Tensor, Tensor)", setup=_setup, backward=_backward,
)  # fmt: skip
