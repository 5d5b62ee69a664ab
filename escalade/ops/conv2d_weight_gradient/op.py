"""`conv2d_weight_gradient` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from escalade.device.cuda import architecture_of
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import CallPlan, prepare
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient.operation import CONV2D_WEIGHT_GRADIENT
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.reference import empty_output
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA, WGMMA_GROUPS
from escalade.ops.shared.images import MEMORY_FORMAT, check_images, empty_images_like, layout_of, packer
from escalade.ops.shared.pooling import as_pair

_SCHEMA = (
    "conv2d_weight_gradient(Tensor x, Tensor gradient, int[2] filter_size, int[2] stride=1, int[2] padding=0, "
    "int[2] dilation=1, int groups=1, bool bias=False, bool tf32=False, str? rung=None) -> (Tensor, Tensor)"
)
Gradients = tuple[torch.Tensor, torch.Tensor]
Finish = Callable[[Gradients], Gradients]
_ON_TENSOR_CORES = (WGMMA, WGMMA_GROUPS, FEW_CHANNELS, SKINNY, WGMMA_SPLIT)


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
    return _on_tensor_cores(sizes, *settings, _dtype(x, tf32), layout_of(x), bias, x.device)


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


def _dtype(x: torch.Tensor, tf32: bool) -> str:
    if tf32 and x.dtype != torch.float32:
        raise UnsupportedError(f"x has dtype {x.dtype}; tf32=True applies to float32 tensors only")
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


class _Call(NamedTuple):
    """Arguments of a call; PyTorch omits trailing arguments that have their defaults."""

    x: torch.Tensor
    gradient: torch.Tensor
    filter_size: Sequence[int]
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    dilation: Sequence[int] = (1, 1)
    groups: int = 1
    bias: bool = False
    tf32: bool = False
    rung: str | None = None


def _fake(*arguments: Any) -> Gradients:
    call = _Call(*arguments)
    x, gradient = call.x, call.gradient
    _check(x, gradient, call.groups)
    _dtype(x, call.tf32)
    filters, channels = gradient.shape[1], x.shape[1] // call.groups
    return empty_images_like(x, (filters, channels, *call.filter_size)), _empty_bias(x, filters, call.bias)


def _empty_bias(x: torch.Tensor, filters: int, bias: bool) -> torch.Tensor:
    return x.new_empty((filters if bias else 0,))


def _plan(*arguments: Any) -> CallPlan:
    x, gradient, filter_size, stride, padding, dilation, groups, bias, tf32, rung = _Call(*arguments)
    _check(x, gradient, groups)
    dtype = _dtype(x, tf32)
    batch, channels, height, width = x.shape
    filters = gradient.shape[1]
    forward = Conv2dProblem(
        batch, channels, height, width, filters, filter_size[0], filter_size[-1], (stride[0], stride[-1]),
        (padding[0], padding[-1]), (dilation[0], dilation[-1]), groups, dtype,
        layout_of(x), bias,
    )  # fmt: skip
    expected = (batch, filters, forward.output_height, forward.output_width)
    if gradient.shape != expected:
        raise UnsupportedError(
            f"gradient has shape {tuple(gradient.shape)}; for {forward.name} it must be {expected}"
        )
    problem = Conv2dWeightGradientProblem(forward)
    prepared = prepare(CONV2D_WEIGHT_GRADIENT, problem, x.device, rung)
    form = problem if prepared is None else prepared.problem
    finish: Finish | None = None
    if prepared is None:
        finish = _zeroed
    elif form.layout != problem.layout:
        finish = partial(_with_layout, problem.layout)
    return CallPlan(
        prepared,
        {"y": empty_output(form, torch.device("meta")), "bias_gradient": _empty_bias(x, filters, bias)},
        dict.fromkeys(("x", "gradient"), packer(form.layout)),
        results=("y", "bias_gradient"),
        finish=finish,
    )


def _zeroed(gradients: Gradients) -> Gradients:
    """Return the gradients for an empty batch."""
    return gradients[0].zero_(), gradients[1].zero_()


def _with_layout(layout: str, gradients: Gradients) -> Gradients:
    return gradients[0].contiguous(memory_format=MEMORY_FORMAT[layout]), gradients[1]


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


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
