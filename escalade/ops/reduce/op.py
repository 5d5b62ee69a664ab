"""`reduce` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

import math
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.reduce.operation import REDUCE
from escalade.ops.reduce.problem import ReduceProblem
from escalade.ops.reduce.reference import peer
from escalade.ops.shared import rows


def reduce(
    x: torch.Tensor,
    kind: str,
    first: int = -1,
    last: int = -1,
    correction: float = 0.0,
    before: str = "",
    activation: str = "",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """The sum, mean, max, min, var or logsumexp over the dimensions from `first` to `last`, which the result has not.

    `before` is an expression in x of each element, such as `x * x`, and `activation` one of each result. `rung` names
    one rung.
    """
    return OPERATOR(x, kind, first, last, correction, before, activation, rung)


def _asked(
    x: torch.Tensor, kind: str, first: int, last: int, correction: float, before: str, activation: str
) -> tuple[ReduceProblem, list[int]]:
    """The problem, and the sizes of its result."""
    rows.check_matrix("reduce", x)
    rank = x.dim()
    if not (-rank <= first < rank and -rank <= last < rank) or first % rank > last % rank:
        raise UnsupportedError(
            f"dimensions {first} to {last} of {rank}: they are a range, each at least {-rank} and below {rank}"
        )
    shape = list(x.shape)
    begin, end = first % rank, last % rank + 1
    outer, inside, inner = (math.prod(part) for part in (shape[:begin], shape[begin:end], shape[end:]))
    problem = ReduceProblem(
        kind,
        outer,
        inside,
        max(1, inner),
        correction,
        before,
        activation=activation,
        dtype=dtype_of("reduce", x),
    )
    return problem, shape[:begin] + shape[end:]


def _plan(
    x: torch.Tensor, kind: str, first: int, last: int, correction: float, before: str, activation: str,
    rung: str | None = None,
) -> Plan:  # fmt: skip
    problem, shape = _asked(x, kind, first, last, correction, before, activation)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    return Plan(None, {"y": y}) if y.numel() == 0 else rows.plan(REDUCE, problem, rung, ("x",), y)


def _fake(
    x: torch.Tensor, kind: str, first: int, last: int, correction: float, before: str, activation: str,
    rung: str | None = None,
) -> torch.Tensor:  # fmt: skip
    _, shape = _asked(x, kind, first, last, correction, before, activation)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *ctx.arguments, _ = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Differentiates PyTorch's own words for the same."""
    (x,) = ctx.saved_tensors
    problem, _ = _asked(x, *ctx.arguments)
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        y = peer(problem, {"x": again})
    (found,) = torch.autograd.grad(y, again, gradient.reshape(y.shape))
    return (found, *(None for _ in ctx.arguments), None)


OPERATOR = define_planned(
    "reduce(Tensor x, str kind, int first, int last, float correction, str before, str activation, str? rung=None) "
    "-> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
)
