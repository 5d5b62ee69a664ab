"""Losses: their problems' buffers, and their operators, each with one that also returns a gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import CallPlan, Packer
from escalade.ops.calling.library import define_planned
from escalade.ops.calling.operator import Operator

REDUCTIONS = ("mean", "sum")
Results = Callable[[], dict[str, torch.Tensor]]


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


# --- the PyTorch operators


def define_loss(
    operation: Operation[Any],
    problem_of: Callable[..., Loss],
    takes: str,
    packers: Callable[[torch.Tensor], dict[str, Packer]],
    empty_gradient: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    of_nothing: Callable[[Any], float] | None = None,
) -> tuple[Operator, Operator]:
    """Define an operation's loss as an operator, and one that returns the loss and its gradient times a scale.

    `problem_of` takes x, target and the settings of the operators, and `gradient` by name. `of_nothing` returns the
    loss of an empty batch.
    """
    name = operation.name
    given = list(inspect.signature(problem_of).parameters.values())[:-1]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    scale = inspect.Parameter("scale", kind, annotation="torch.Tensor")
    rung = inspect.Parameter("rung", kind, annotation="str | None", default=None)

    def plan(x: torch.Tensor, target: torch.Tensor, *settings: Any) -> CallPlan:
        return planned(x, target, settings, lambda: {"y": empty_loss(x)}, gradient=False)

    def plan_with_gradient(
        x: torch.Tensor, target: torch.Tensor, _: torch.Tensor, *settings: Any
    ) -> CallPlan:
        return planned(
            x, target, settings, lambda: {"loss": empty_loss(x), "y": empty_gradient(x)}, gradient=True
        )

    def planned(
        x: torch.Tensor, target: torch.Tensor, settings: Sequence[Any], results: Results, gradient: bool
    ) -> CallPlan:
        problem = problem_of(x, target, *settings[:-1], gradient=gradient)

        def fill(result: Any) -> Any:
            assert of_nothing is not None
            (result[0] if gradient else result).fill_(of_nothing(problem))
            return result

        return CallPlan(operation, results, lambda: problem, packers(x), fill=fill)

    def empty_loss(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((), dtype=torch.float32)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, target, *ctx.settings, _ = inputs
        ctx.save_for_backward(x, target)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, target = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            raise UnsupportedError(f"{name} is differentiable by x only; detach the target")
        _, found = with_gradient(x, target, gradient, *ctx.settings, None)
        return found, *(None,) * len(given)

    def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(f"{name} has no second derivative")

    plan.__signature__ = inspect.Signature([*given, rung])  # type: ignore[attr-defined]
    plan_with_gradient.__signature__ = inspect.Signature([*given[:2], scale, *given[2:], rung])  # type: ignore[attr-defined]
    loss = define_planned(name, plan, takes, setup=setup, backward=backward)
    with_gradient = define_planned(
        f"{name}_with_gradient", plan_with_gradient, f"{takes}, scale: 1 of float32",
        returns="(Tensor, Tensor)", setup=setup_nothing, backward=no_second_derivative,
    )  # fmt: skip
    return loss, with_gradient
