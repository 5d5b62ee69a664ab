"""`pointwise_loss` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors its kernels on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Lay, Plan, launched
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.pointwise_loss.operation import POINTWISE_LOSS
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem
from escalade.ops.pointwise_loss.problems import MSE
from escalade.ops.shared.losses import check_scale, no_second_derivative
from escalade.ops.shared.pointwise import ordering


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
    return OPERATOR(x, target, expression, reduction, rung)


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
    loss, gradient = _WITH_GRADIENT(x, target, scale, expression, reduction, rung)
    return loss, gradient


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


def _fake(
    x: torch.Tensor, target: torch.Tensor, expression: str, reduction: str = "mean", rung: str | None = None
) -> torch.Tensor:
    _problem(x, target, expression, reduction, gradient=False)
    return x.new_empty((), dtype=torch.float32)


def _plan(x: torch.Tensor, target: torch.Tensor, expression: str, reduction: str, rung: str | None) -> Plan:
    problem = _problem(x, target, expression, reduction, gradient=False)
    loss = torch.empty((), device="meta")
    return Plan(launched(POINTWISE_LOSS, problem, x.device, rung), {"y": loss}, _order(x))


def _fake_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, expression: str, reduction: str = "mean",
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _problem(x, target, expression, reduction, gradient=True)
    check_scale("pointwise_loss", x, scale)
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x)


def _plan_with_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    expression: str,
    reduction: str,
    rung: str | None,
) -> Plan:
    loss, gradient = _fake_with_gradient(x, target, scale, expression, reduction)
    problem = _problem(x, target, expression, reduction, gradient=True)
    return Plan(
        launched(POINTWISE_LOSS, problem, x.device, rung),
        {"loss": loss, "y": gradient},
        _order(x),
        results=("loss", "y"),
    )


def _order(x: torch.Tensor) -> dict[str, Lay]:
    """Both tensors without gaps, in the order that x has its dimensions in."""
    return dict.fromkeys(("x", "target"), ordering(torch.empty_like(x, device="meta")))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, target, ctx.expression, ctx.reduction, _ = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, target = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        raise UnsupportedError("pointwise_loss has a gradient by x alone; its target needs none: detach it")
    _, found = _WITH_GRADIENT(x, target, gradient, ctx.expression, ctx.reduction, None)
    return found, None, None, None, None


OPERATOR = define_planned(
    "pointwise_loss(Tensor x, Tensor target, str expression, str reduction='mean', str? rung=None) -> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
)
_SETUP_NONE, _BACKWARD_NONE = no_second_derivative("pointwise_loss")
_WITH_GRADIENT = define_planned(
    "pointwise_loss_with_gradient(Tensor x, Tensor target, Tensor scale, str expression, str reduction='mean', "
    "str? rung=None) -> (Tensor, Tensor)",
    _plan_with_gradient,
    _fake_with_gradient,
    setup=_SETUP_NONE,
    backward=_BACKWARD_NONE,
)
