"""`conv2d_weight_gradient` as a PyTorch operator: the chosen rung on CUDA tensors, on CPU tensors the twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.device.cuda import architecture_of
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_alike, require_rung, without_launch
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient.operation import CONV2D_WEIGHT_GRADIENT
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.reference import empty_output
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA
from escalade.ops.shared.images import MEMORY_FORMAT, check_images, laid_out, layout_of
from escalade.ops.shared.pooling import two

_SCHEMA = (
    "conv2d_weight_gradient(Tensor x, Tensor gradient, int[2] filter_size, int[2] stride=1, int[2] padding=0, "
    "int[2] dilation=1, int groups=1, bool bias=False, bool tf32=False, str? rung=None) -> (Tensor, Tensor)"
)
Gradients = tuple[torch.Tensor, torch.Tensor]
_ON_TENSOR_CORES = (WGMMA, FEW_CHANNELS, SKINNY, WGMMA_SPLIT)


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
    """The gradients of a convolution's weights and bias (None unless `bias`) from x and the gradient of its result.

    Shapes are PyTorch's: x [N, C, H, W], gradient [N, K, P, Q], weights [K, C/groups, R, S] for a `filter_size` of
    (R, S), in the layout of x. Sums are fp32, and the same inputs give the same bits every time. `tf32` allows TF32
    products for fp32 tensors; `rung` names one rung of the ladder instead of the chosen one.
    """
    of_weight, of_bias = torch.ops.escalade.conv2d_weight_gradient(
        x, gradient, two(filter_size, "filter_size"), two(stride, "stride"), two(padding, "padding"),
        two(dilation, "dilation"), groups, bias, tf32, rung,
    )  # fmt: skip
    return of_weight, of_bias if bias else None


def for_autograd(
    x: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
    tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The gradients where tensor cores make them; None where PyTorch is to.

    Asks nothing of the sizes of images and batch, which may be symbols while a program is traced.
    """
    if gradient.dtype != x.dtype:
        return None
    filters, _, filter_height, filter_width = weight.shape
    # The smallest image that the filter fits in: its windows have the same corners, counted from either side.
    alike = Conv2dProblem(
        1, x.shape[1], dilation[0] * (filter_height - 1) + 1, dilation[1] * (filter_width - 1) + 1, filters,
        filter_height, filter_width, (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]),
        groups, _dtype(x, tf32), layout_of(x), bias,
    )  # fmt: skip
    problem, here = Conv2dWeightGradientProblem(alike), architecture_of(x.device)
    rungs = (rung for rung in _ON_TENSOR_CORES if here is None or here in rung.architectures)
    if all(rung.supports(problem) for rung in rungs):
        return None
    of_weight, of_bias = torch.ops.escalade.conv2d_weight_gradient(
        x, gradient, [filter_height, filter_width], stride, padding, dilation, groups, bias, tf32
    )
    return of_weight, of_bias if bias else None


def _dtype(x: torch.Tensor, tf32: bool) -> str:
    if tf32 and x.dtype != torch.float32:
        raise UnsupportedError(f"tf32=True is a way to multiply float32 tensors; x is {x.dtype}")
    return "tf32" if tf32 else dtype_of("conv2d_weight_gradient", x)


def _check(x: torch.Tensor, gradient: torch.Tensor, groups: int) -> None:
    check_images("conv2d_weight_gradient", x)
    require_alike(x, {"gradient": gradient})
    if gradient.dim() != 4 or gradient.shape[0] != x.shape[0]:
        raise UnsupportedError(
            f"gradient has shape {tuple(gradient.shape)}; for x {tuple(x.shape)} it must be [{x.shape[0]}, K, P, Q]"
        )
    if groups < 1 or x.shape[1] % groups or gradient.shape[1] % groups:
        raise UnsupportedError(
            f"{x.shape[1]} channels and {gradient.shape[1]} filters cannot be split into {groups} groups"
        )


def _run(
    x: torch.Tensor,
    gradient: torch.Tensor,
    filter_size: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    bias: bool = False,
    tf32: bool = False,
    rung: str | None = None,
    *,
    launch: bool = True,
) -> Gradients:
    _check(x, gradient, groups)
    dtype = _dtype(x, tf32)
    batch, channels, height, width = x.shape
    filters = gradient.shape[1]
    of_bias = x.new_empty((filters if bias else 0,))
    if not launch:
        of_weight = torch.empty(
            (filters, channels // groups, *filter_size),
            dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT[layout_of(x)],
        )  # fmt: skip
        return of_weight, of_bias
    forward = Conv2dProblem(
        batch, channels, height, width, filters, filter_size[0], filter_size[-1], (stride[0], stride[-1]),
        (padding[0], padding[-1]), (dilation[0], dilation[-1]), groups, dtype,
        layout_of(x), bias,
    )  # fmt: skip
    expected = (batch, filters, forward.output_height, forward.output_width)
    if gradient.shape != expected:
        raise UnsupportedError(
            f"gradient has shape {tuple(gradient.shape)}; that of the result of {forward.name} is {expected}"
        )
    problem = Conv2dWeightGradientProblem(forward)
    if batch == 0:
        require_rung(CONV2D_WEIGHT_GRADIENT, rung)
        return empty_output(problem, x.device).zero_(), of_bias.zero_()
    prepared = ready(CONV2D_WEIGHT_GRADIENT, problem, x.device, rung)
    layout = prepared.problem.layout
    y = empty_output(prepared.problem, x.device)
    images = {"x": laid_out(x, layout), "gradient": laid_out(gradient, layout)}
    prepared.run({**images, "y": y, "bias_gradient": of_bias if bias else None})
    return y.contiguous(memory_format=MEMORY_FORMAT[problem.layout]), of_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    x, gradient, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, ctx.bias, *_ = inputs
    ctx.save_for_backward(x, gradient)


def _backward(ctx: Any, of_weight: torch.Tensor, of_bias: torch.Tensor) -> tuple[Any, ...]:
    """It is linear in each of x and gradient; by PyTorch's own convolutions."""
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


define(_SCHEMA, _run, without_launch(_run), setup=_setup, backward=_backward)
