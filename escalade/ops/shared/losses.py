"""Losses: their problems' buffers, and their operators, each with one that also returns a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import CallPlan, Packer, prepare
from escalade.ops.calling.library import define_planned
from escalade.ops.calling.operator import Operator

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


# --- the PyTorch operators


def define_loss(
    operation: Operation[Any],
    settings: str,
    problem_of: Callable[..., Loss],
    packers: Callable[[torch.Tensor], dict[str, Packer]],
    empty_gradient: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
    of_nothing: Callable[[Any], float] | None = None,
) -> tuple[Operator, Operator]:
    """Define an operation's loss as an operator, and one that returns the loss and its gradient times a scale.

    `settings` are the arguments behind x and target in the schema. `problem_of` takes all arguments, and `gradient` by
    name. `of_nothing` returns the loss of an empty batch.
    """
    name = operation.name
    count = settings.count(",") + 1

    def plan(x: torch.Tensor, target: torch.Tensor, *arguments: Any) -> CallPlan:
        problem = problem_of(x, target, *arguments, gradient=False)
        return planned(problem, {"y": fake(x, target, *arguments)}, ("y",), x, arguments[-1])

    def fake(x: torch.Tensor, target: torch.Tensor, *arguments: Any) -> torch.Tensor:
        problem_of(x, target, *arguments, gradient=False)
        return x.new_empty((), dtype=torch.float32)

    def plan_with_gradient(
        x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, *arguments: Any
    ) -> CallPlan:
        problem = problem_of(x, target, *arguments, gradient=True)
        loss, gradient = fake_with_gradient(x, target, scale, *arguments)
        return planned(problem, {"loss": loss, "y": gradient}, ("loss", "y"), x, arguments[-1])

    def fake_with_gradient(
        x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        problem_of(x, target, *arguments, gradient=True)
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
            raise UnsupportedError(
                f"scale has {scale.numel()} elements, {scale.dtype} on {scale.device}: {name} needs one float32 "
                f"number on {x.device}"
            )
        return x.new_empty((), dtype=torch.float32), empty_gradient(x)

    def planned(
        problem: Loss,
        made: dict[str, torch.Tensor],
        results: tuple[str, ...],
        x: torch.Tensor,
        rung: str | None,
    ) -> CallPlan:
        def fill(result: Any) -> Any:
            assert of_nothing is not None
            (result if len(results) == 1 else result[0]).fill_(of_nothing(problem))
            return result

        finish = fill if problem.batch == 0 else None
        return CallPlan(
            prepare(operation, problem, x.device, rung), made, packers(x), results=results, finish=finish
        )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, target, *ctx.settings, _ = inputs
        ctx.save_for_backward(x, target)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, target = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            raise UnsupportedError(f"{name} is differentiable by x only; detach the target")
        _, found = with_gradient(x, target, gradient, *ctx.settings, None)
        return found, *(None,) * (count + 2)

    def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        raise UnsupportedError(f"{name} has no second derivative")

    schema = f"{settings}, str? rung=None"
    loss = define_planned(
        f"{name}(Tensor x, Tensor target, {schema}) -> Tensor", plan, fake, setup=setup, backward=backward
    )
    with_gradient = define_planned(
        f"{name}_with_gradient(Tensor x, Tensor target, Tensor scale, {schema}) -> (Tensor, Tensor)",
        plan_with_gradient, fake_with_gradient, setup=setup_nothing, backward=no_second_derivative,
    )  # fmt: skip
    return loss, with_gradient
