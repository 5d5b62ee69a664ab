"""`add` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError
from escalade.ops.add.operation import ADD
from escalade.ops.add.problem import AddProblem
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.shared import pointwise


def add(
    x: torch.Tensor, residual: torch.Tensor, *, relu: bool = False, rung: str | None = None
) -> torch.Tensor:
    """x + residual, then max(…, 0) if `relu`; tensors of one shape, the result in x's layout."""
    return OPERATOR(x, residual, relu, rung)


def _check(x: torch.Tensor, residual: torch.Tensor) -> str:
    dtype = dtype_of("add", x)
    require_alike(x, {"residual": residual})
    if x.shape != residual.shape:
        raise UnsupportedError(
            f"x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; add takes one shape for both"
        )
    return dtype


def _plan(x: torch.Tensor, residual: torch.Tensor, relu: bool, rung: str | None) -> Plan:
    problem = AddProblem(x.numel(), relu, _check(x, residual))
    return pointwise.plan(ADD, problem, ("x", "residual"), x, rung)


def _fake(
    x: torch.Tensor, residual: torch.Tensor, relu: bool = False, rung: str | None = None
) -> torch.Tensor:
    _check(x, residual)
    return torch.empty_like(x)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output if inputs[2] else None)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    (y,) = ctx.saved_tensors
    if y is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    return gradient, gradient, None, None


OPERATOR = define_planned(
    "add(Tensor x, Tensor residual, bool relu=False, str? rung=None) -> Tensor",
    _plan, _fake, setup=_setup, backward=_backward,
)  # fmt: skip
