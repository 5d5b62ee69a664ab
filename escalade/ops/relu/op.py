"""`relu` and `relu_` as PyTorch operators: on CUDA tensors the chosen rung, on CPU tensors the twin."""

from __future__ import annotations

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_in_place, define_planned
from escalade.ops.relu.operation import RELU
from escalade.ops.relu.problem import ReluProblem
from escalade.ops.shared import pointwise


def relu(x: torch.Tensor, limit: float | None = None, *, rung: str | None = None) -> torch.Tensor:
    """max(x, 0), at most `limit` if there is one (6.0 is ReLU6); a tensor of any shape, the result in its layout."""
    return OPERATOR(x, limit, rung)


def relu_(x: torch.Tensor, limit: float | None = None, *, rung: str | None = None) -> torch.Tensor:
    """`relu` in place: x is overwritten, and returned. For tensors that need no gradient."""
    _IN_PLACE(x, limit, rung)
    return x


def _problem(x: torch.Tensor, limit: float | None) -> ReluProblem:
    return ReluProblem(x.numel(), limit, dtype_of("relu", x))


def _plan(x: torch.Tensor, limit: float | None, rung: str | None) -> Plan:
    return pointwise.plan(RELU, _problem(x, limit), ("x",), x, rung)


def _run_in_place(x: torch.Tensor, limit: float | None = None, rung: str | None = None) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise UnsupportedError(
            "several elements of x share memory; relu_ takes tensors that own each element"
        )
    dense = x.stride() == torch.empty_like(x, device="meta").stride()
    y = aligned(x) if dense else torch.empty_like(x).copy_(x)
    pointwise.run(RELU, _problem(x, limit), {"x": y}, y, rung)
    if y.data_ptr() != x.data_ptr():
        x.copy_(y)


def _fake(x: torch.Tensor, limit: float | None = None, rung: str | None = None) -> torch.Tensor:
    dtype_of("relu", x)
    return torch.empty_like(x)


def _fake_in_place(x: torch.Tensor, limit: float | None = None, rung: str | None = None) -> None:
    dtype_of("relu", x)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    (y,) = ctx.saved_tensors
    return _GRADIENT(gradient, y, ctx.kept), None, None


def _limit(inputs):  # type: ignore[no-untyped-def]
    return inputs[1]


# --- its gradient


def _plan_gradient(gradient: torch.Tensor, output: torch.Tensor, limit: float | None) -> Plan:
    """The gradient from the output alone. At a NaN the gradient passes, whatever the processor (PyTorch's own gradient
    of hardtanh differs there)."""
    problem = ReluProblem(output.numel(), limit, dtype_of("relu", output), backward=True)
    return pointwise.plan(RELU, problem, ("gradient", "output"), output, None)


def _fake_gradient(gradient: torch.Tensor, output: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    return torch.empty_like(output)


def _setup_gradient(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, y, ctx.limit = inputs
    ctx.save_for_backward(y)


def _backward_gradient(ctx, gradient):  # type: ignore[no-untyped-def]
    """The result is linear in the gradient, and does not change with the output by little."""
    (y,) = ctx.saved_tensors
    return _GRADIENT(gradient, y, ctx.limit), None, None


_GRADIENT = define_planned(
    "relu_backward(Tensor gradient, Tensor output, float? limit=None) -> Tensor",
    _plan_gradient,
    _fake_gradient,
    setup=_setup_gradient,
    backward=_backward_gradient,
)
OPERATOR = define_planned(
    "relu(Tensor x, float? limit=None, str? rung=None) -> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
    kept=_limit,
)
_IN_PLACE = define_in_place(
    "relu_(Tensor(a!) x, float? limit=None, str? rung=None) -> ()",
    _run_in_place,
    _fake_in_place,
    instead="relu, or ",
)
