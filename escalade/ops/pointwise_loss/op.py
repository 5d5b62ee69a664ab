"""`pointwise_loss` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors its kernels on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import aligned, ready
from escalade.ops.calling.library import define, require_alike, without_launch
from escalade.ops.pointwise_loss.operation import POINTWISE_LOSS
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem
from escalade.ops.pointwise_loss.problems import MSE
from escalade.ops.shared.losses import check_scale, no_second_derivative
from escalade.ops.shared.pointwise import ordered_like


def pointwise_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    expression: str,
    reduction: str = "mean",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """The mean or sum of an expression of each element of x and target, an fp32 number; always the same bits.

    The expression has two results, the loss of an element and its derivative by x, such as `square(x - target), 2 * (x
    - target)`. The backward pass computes both anew from x and target, in one pass. `rung` names one rung.
    """
    return torch.ops.escalade.pointwise_loss(x, target, expression, reduction, rung)


def pointwise_loss_with_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    expression: str,
    reduction: str = "mean",
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and `scale` times its gradient by x, in one pass: `scale` is an fp32 number on the device, what a loss
    is multiplied by before its gradients are taken."""
    found = torch.ops.escalade.pointwise_loss_with_gradient(x, target, scale, expression, reduction, rung)
    return found[0], found[1]


def mse_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", *, rung: str | None = None
) -> torch.Tensor:
    """The mean or sum of squared differences, an fp32 number. `rung` names one rung of pointwise_loss."""
    return pointwise_loss(x, target, MSE, reduction, rung=rung)


def _problem(
    x: torch.Tensor, target: torch.Tensor, expression: str, reduction: str, gradient: bool
) -> PointwiseLossProblem:
    dtype = dtype_of("pointwise_loss", x)
    require_alike(x, {"target": target})
    if target.shape != x.shape:
        raise UnsupportedError(
            f"x is {list(x.shape)} and target {list(target.shape)}; a loss takes two tensors of one shape"
        )
    return PointwiseLossProblem(x.numel(), expression, reduction, gradient, dtype)


def _run(
    x: torch.Tensor, target: torch.Tensor, expression: str, reduction: str = "mean", rung: str | None = None,
    *, launch: bool = True,
) -> torch.Tensor:  # fmt: skip
    problem = _problem(x, target, expression, reduction, gradient=False)
    loss = x.new_empty((), dtype=torch.float32)
    if launch:
        x = _dense(x)
        tensors = {"x": x, "target": ordered_like(target, x)}
        ready(POINTWISE_LOSS, problem, x.device, rung).run({**tensors, "y": loss})
    return loss


def _run_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, expression: str, reduction: str = "mean",
    rung: str | None = None, *, launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    problem = _problem(x, target, expression, reduction, gradient=True)
    check_scale("pointwise_loss", x, scale)
    loss, gradient = x.new_empty((), dtype=torch.float32), torch.empty_like(x)
    if launch:
        tensors = {"x": ordered_like(x, gradient), "target": ordered_like(target, gradient), "scale": scale}
        ready(POINTWISE_LOSS, problem, x.device, rung).run({**tensors, "loss": loss, "y": gradient})
    return loss, gradient


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps, in whatever order of its dimensions."""
    return aligned(x if x.stride() == torch.empty_like(x, device="meta").stride() else x.contiguous())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, target, ctx.expression, ctx.reduction, _ = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, target = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        raise UnsupportedError("pointwise_loss has a gradient by x alone; its target needs none: detach it")
    _, found = torch.ops.escalade.pointwise_loss_with_gradient(
        x, target, gradient, ctx.expression, ctx.reduction
    )
    return found, None, None, None, None


define(
    "pointwise_loss(Tensor x, Tensor target, str expression, str reduction='mean', str? rung=None) -> Tensor",
    _run,
    without_launch(_run),
    setup=_setup,
    backward=_backward,
)
_SETUP_NONE, _BACKWARD_NONE = no_second_derivative("pointwise_loss")
define(
    "pointwise_loss_with_gradient(Tensor x, Tensor target, Tensor scale, str expression, str reduction='mean', "
    "str? rung=None) -> (Tensor, Tensor)",
    _run_with_gradient,
    without_launch(_run_with_gradient),
    setup=_SETUP_NONE,
    backward=_BACKWARD_NONE,
)
