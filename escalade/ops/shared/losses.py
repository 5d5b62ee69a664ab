"""What losses share: how terms are reduced, where results lie, and how operators are given gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.problem import Problem

REDUCTIONS = ("mean", "sum")


class Loss(Problem, Protocol):
    """A loss, and with `gradient` that of x as well."""

    @property
    def gradient(self) -> bool: ...


def loss_buffer(problem: Loss) -> str:
    """The buffer of the loss: y is the gradient where there is one."""
    return "loss" if problem.gradient else "y"


def room_for_loss(problem: Loss, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for the loss beside that for the gradient."""
    return {"loss": torch.empty(1, device=device)} if problem.gradient else {}


def gradient_of(loss: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What PyTorch says is the gradient of x, for one of the loss that is `scale`."""
    (found,) = torch.autograd.grad(loss, x, scale.reshape(loss.shape).to(loss.dtype))
    return found


def check_scale(operation: str, x: torch.Tensor, scale: torch.Tensor) -> None:
    """The gradient that comes in: one fp32 number where x is."""
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
        raise UnsupportedError(
            f"a scale of {scale.numel()} elements, {scale.dtype} on {scale.device}: {operation} takes one float32 "
            f"number on {x.device}"
        )


def no_second_derivative(operation: str) -> tuple[Any, Any]:
    """Set-up and gradient of an operator that is a gradient itself: there is no further one."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(f"{operation} has first derivatives only")

    return setup, backward
