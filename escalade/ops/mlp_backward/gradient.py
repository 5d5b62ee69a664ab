"""The gradient of `mlp` for autograd, by `mlp_backward`."""

from __future__ import annotations

from typing import Any

import torch

from escalade.ops.mlp_backward.op import split


def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, parameters, ctx.layers, ctx.error = inputs[:4]
    ctx.save_for_backward(x, *parameters)


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """For every argument that was given; those left at their defaults at the end of a call are left out here too."""
    x, *parameters = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    if ctx.error:
        gradient = _of_reconstruction(x, parameters, ctx.layers, gradient)
    result = torch.ops.escalade.mlp_backward(x, gradient, parameters, ctx.layers, need_x)
    grad_x, gradients = split(result, x, parameters, need_x)
    if grad_x is not None and ctx.error:
        grad_x = grad_x - gradient  # the error's other side
    wanted = [
        each if needed else None for each, needed in zip(gradients, ctx.needs_input_grad[1], strict=True)
    ]
    return grad_x, wanted, *(None for _ in ctx.needs_input_grad[2:])


def _of_reconstruction(
    x: torch.Tensor, parameters: list[torch.Tensor], layers: str, gradient: torch.Tensor
) -> torch.Tensor:
    """From the gradient of each row's mean squared difference to that of y, which is made again."""
    y = torch.ops.escalade.mlp(x, parameters, layers)
    difference = y.float() - x.float()
    return (difference * (2 / x.shape[-1] * gradient).unsqueeze(-1)).to(x.dtype)
