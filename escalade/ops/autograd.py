"""Gradients of operators that are operators themselves: ties `conv2d`, `mlp` and pools to theirs.

This module is above both sides, so that an operator and its gradient need not import each other. An operator whose
gradient is a few lines of PyTorch defines it in its own module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from escalade.ops.avg_pool2d_backward import OPERATOR as AVG_POOL2D_BACKWARD
from escalade.ops.batch_norm_backward import OPERATOR as BATCH_NORM_BACKWARD
from escalade.ops.calling.library import define_gradient
from escalade.ops.conv2d_input_gradient.op import OPERATOR as CONV2D_INPUT_GRADIENT
from escalade.ops.conv2d_input_gradient.op import is_worthwhile
from escalade.ops.conv2d_weight_gradient.op import OPERATOR as CONV2D_WEIGHT_GRADIENT
from escalade.ops.conv2d_weight_gradient.op import is_on_tensor_cores
from escalade.ops.max_pool2d_backward import OPERATOR as MAX_POOL2D_BACKWARD
from escalade.ops.mlp import OPERATOR as MLP
from escalade.ops.mlp_backward import OPERATOR as MLP_BACKWARD
from escalade.ops.mlp_backward import split
from escalade.ops.shared.images import MEMORY_FORMAT, layout_of
from escalade.ops.upsample2d_backward import OPERATOR as UPSAMPLE2D_BACKWARD


def _setup_conv2d(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, _, _, _, _, _, relu, _, _ = inputs
    ctx.save_for_backward(x, weight, output if relu else None)


def _saved_for_conv2d(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the settings, the presence of bias and residual, which gradients are Escalade's (of x, and of the weights
    without and with that of the bias), and the memory format of gradients."""
    x, weight, bias, residual, stride, padding, dilation, groups, _, tf32, _ = inputs
    settings = (tuple(stride), tuple(padding), tuple(dilation), groups)
    ours = (
        is_worthwhile(stride, groups),
        [is_on_tensor_cores(x, weight, *settings, of_bias, tf32) for of_bias in (False, True)],
    )
    return settings, tf32, bias is not None, residual is not None, *ours, MEMORY_FORMAT[layout_of(x)]


def _conv2d_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Compute gradients with Escalade where it has more than a direct kernel, the others with PyTorch."""
    x, weight, output = ctx.saved_tensors
    settings, tf32, has_bias, has_residual, worthwhile, on_tensor_cores, memory_format = ctx.kept
    if output is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
    # PyTorch omits trailing arguments that were left at their defaults.
    need_x, need_weight, need_bias, need_residual = (*ctx.needs_input_grad, False, False, False)[:4]
    need_bias = has_bias and need_bias
    our_x = need_x and worthwhile
    our_weight = need_weight and on_tensor_cores[need_bias] and gradient.dtype == x.dtype
    left = [need_x and not our_x, need_weight and not our_weight, need_bias and not our_weight]
    grad_x = grad_weight = grad_bias = None
    if any(left):
        *spatial, groups = settings
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, [weight.shape[0]] if has_bias else None, *spatial, False, [0, 0], groups, left
        )  # fmt: skip
    if our_weight:
        grad_weight, grad_bias = CONV2D_WEIGHT_GRADIENT(
            x, gradient, weight.shape[2:], *settings, need_bias, tf32, None
        )
    if our_x:
        grad_x = CONV2D_INPUT_GRADIENT(
            gradient.contiguous(memory_format=memory_format), weight, x.shape[2:], None, *settings, tf32, None
        )
    grad_bias = grad_bias if need_bias else None
    grad_residual = gradient if has_residual and need_residual else None
    return grad_x, grad_weight, grad_bias, grad_residual, None, None, None, None, None, None, None


def _setup_mlp(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, parameters, ctx.layers, ctx.error = inputs[:4]
    ctx.save_for_backward(x, *parameters)


def _mlp_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Return a gradient for every argument given; PyTorch omits trailing arguments left at their defaults."""
    x, *parameters = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    if ctx.error:
        gradient = _gradient_of_reconstruction(x, parameters, ctx.layers, gradient)
    result = MLP_BACKWARD(x, gradient, parameters, ctx.layers, need_x, None)
    grad_x, gradients = split(result, x, parameters, need_x)
    if grad_x is not None and ctx.error:
        grad_x = grad_x - gradient  # x is also the target of the error
    wanted = [
        each if needed else None for each, needed in zip(gradients, ctx.needs_input_grad[1], strict=True)
    ]
    return grad_x, wanted, *(None for _ in ctx.needs_input_grad[2:])


def _gradient_of_reconstruction(
    x: torch.Tensor, parameters: list[torch.Tensor], layers: str, gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of y from that of each row's mean squared error, with y recomputed."""
    difference = MLP(x, parameters, layers, False, None).float()
    difference -= x
    difference *= (gradient * (2 / x.shape[-1])).unsqueeze(-1)
    return difference.to(x.dtype)


def _saved_for_images(last: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the size of x, True if it is NHWC, and the settings without the `last` arguments."""
    x, *settings = inputs
    return tuple(x.shape[2:]), layout_of(x) == "nhwc", tuple(settings[:-last])


def _setup_max_pool2d(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _max_pool2d_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Recompute the argmax places from x."""
    (x,) = ctx.saved_tensors
    size, channels_last, windows = ctx.kept
    grad_x = MAX_POOL2D_BACKWARD(gradient, x, None, size, *windows, False, channels_last, None)
    return grad_x, None, None, None, None, None


def _setup_max_pool2d_with_places(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ctx.save_for_backward(output[1])


def _max_pool2d_with_places_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    """Argmax places have no gradient, and x need not be saved."""
    (places,) = ctx.saved_tensors
    size, channels_last, windows = ctx.kept
    grad_x = MAX_POOL2D_BACKWARD(gradient, None, places, size, *windows, False, channels_last, None)
    return grad_x, *(None,) * 6


def _avg_pool2d_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    size, channels_last, windows = ctx.kept
    grad_x = AVG_POOL2D_BACKWARD(gradient, size, *windows, channels_last, None)
    return grad_x, *(None,) * 7


def _setup_adaptive_avg_pool2d(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.output, _ = inputs
    ctx.save_for_backward(x)


def _adaptive_avg_pool2d_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Windows that divide the image evenly are those of `avg_pool2d`. PyTorch handles the others, and reads only the
    shape of x."""
    (x,) = ctx.saved_tensors
    size = x.shape[2:]
    if any(size[d] % ctx.output[d] for d in (0, 1)):
        return torch.ops.aten._adaptive_avg_pool2d_backward(gradient, x), None, None
    window = (size[0] // ctx.output[0], size[1] // ctx.output[1])
    grad_x = AVG_POOL2D_BACKWARD(
        gradient, size, window, window, (0, 0), False, True, 0, layout_of(x) == "nhwc", None
    )
    return grad_x, None, None


def _upsample2d_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    size, channels_last, (_, *settings) = ctx.kept
    grad_x = UPSAMPLE2D_BACKWARD(gradient, size, *settings, channels_last, None)
    return grad_x, *(None,) * 5


def _setup_batch_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save the output only if a residual was added; otherwise the ReLU's mask follows from x."""
    x, weight, bias, _, _, _, _, ctx.relu, residual, _ = inputs
    y, mean, rstd, *moved = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(mean, rstd, *moved)
    ctx.save_for_backward(x, weight, bias, mean, rstd, y if ctx.relu and ctx.has_residual else None)


def _batch_norm_backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, mean, rstd, y = ctx.saved_tensors
    found = BATCH_NORM_BACKWARD(gradient, x, weight, bias, mean, rstd, ctx.relu, y, y is not None, None)
    parameters = zip(found[1:3], (weight, bias), strict=True)
    of_parameters = (None if given is None else one.to(given.dtype) for one, given in parameters)
    of_residual = found[3] if y is not None else gradient
    return found[0], *of_parameters, *(None,) * 5, of_residual if ctx.has_residual else None, None


def register() -> None:
    """Register the gradients of operators that other modules define."""
    define_gradient("conv2d", _setup_conv2d, _conv2d_backward, kept=_saved_for_conv2d)
    define_gradient("batch_norm_training", _setup_batch_norm, _batch_norm_backward, first_alone=True)
    define_gradient("avg_pool2d", None, _avg_pool2d_backward, kept=partial(_saved_for_images, 1))
    define_gradient("adaptive_avg_pool2d", _setup_adaptive_avg_pool2d, _adaptive_avg_pool2d_backward)
    define_gradient("max_pool2d", _setup_max_pool2d, _max_pool2d_backward, kept=partial(_saved_for_images, 1))
    define_gradient(
        "max_pool2d_with_places",
        _setup_max_pool2d_with_places,
        _max_pool2d_with_places_backward,
        kept=partial(_saved_for_images, 2),
        first_alone=True,
    )
    define_gradient("mlp", _setup_mlp, _mlp_backward)
    define_gradient("upsample2d", None, _upsample2d_backward, kept=partial(_saved_for_images, 1))
