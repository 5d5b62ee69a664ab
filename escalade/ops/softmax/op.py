"""`softmax` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import rows
from escalade.ops.softmax.operation import SOFTMAX
from escalade.ops.softmax.problem import SoftmaxProblem


def softmax(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """The softmax along the last dimension, in x's dtype; the sums are fp32. `rung` names one rung of the ladder."""
    return OPERATOR(x, rung)


def _plan(x: torch.Tensor, rung: str | None = None) -> Plan:
    rows.check_matrix("softmax", x)
    problem = SoftmaxProblem(rows.rows_of(x), x.shape[-1], dtype_of("softmax", x))
    return rows.plan(SOFTMAX, problem, rung, ("x",), torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _fake(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    rows.check_matrix("softmax", x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data(gradient, output, -1, output.dtype), None


OPERATOR = define_planned(
    "softmax(Tensor x, str? rung=None) -> Tensor", _plan, _fake, setup=_setup, backward=_backward
)
