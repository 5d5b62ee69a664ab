"""Losses: reductions, result buffers, and gradients of their operators."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.problem import Problem

REDUCTIONS = ("mean", "sum")


class Loss(Problem, Protocol):
    """A loss; with `gradient` also the gradient of x."""

    @property
    def gradient(self) -> bool: ...


def loss_buffer(problem: Loss) -> str:
    """Return the buffer of the loss: y holds the gradient if there is one."""
    return "loss" if problem.gradient else "y"


def empty_loss(problem: Loss, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the extra output next to the gradient."""
    return {"loss": torch.empty(1, device=device)} if problem.gradient else {}


def gradient_of(loss: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's gradient of x for a loss gradient of `scale`."""
    (found,) = torch.autograd.grad(loss, x, scale.reshape(loss.shape).to(loss.dtype))
    return found


def check_scale(operation: str, x: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise unless the incoming gradient is one fp32 number on x's device."""
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
        raise UnsupportedError(
            f"scale has {scale.numel()} elements, {scale.dtype} on {scale.device}: {operation} needs one float32 "
            f"number on {x.device}"
        )


def no_second_derivative(operation: str) -> tuple[Any, Any]:
    """Return setup and gradient functions of an operator that is itself a gradient and not differentiable."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(f"{operation} has no second derivative")

    return setup, backward
