"""`top_k` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import rows
from escalade.ops.top_k.operation import TOP_K
from escalade.ops.top_k.problem import MOST_K, TopKProblem


def top_k(x: torch.Tensor, k: int, *, rung: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of softmax(x) along the last dimension, in falling order and fp32, and their classes.

    Classes are ranked by their logits: NaN first, and of equal ones the lower class. `torch.ops.escalade.top_k` gives
    both in one tensor. `rung` names one rung of the ladder instead of the chosen one.
    """
    both = OPERATOR(x, k, rung)
    return both[..., :k], both[..., k:].long()


def _check(x: torch.Tensor, k: int) -> None:
    rows.check_matrix("top_k", x)
    if not 1 <= k <= MOST_K:
        raise UnsupportedError(f"k of {k}: top_k finds 1 to {MOST_K}")


def _plan(x: torch.Tensor, k: int, rung: str | None = None) -> Plan:
    _check(x, k)
    problem = TopKProblem(rows.rows_of(x), x.shape[-1], k, dtype_of("top_k", x))
    y = torch.empty((*x.shape[:-1], 2 * k), dtype=torch.float32, device=x.device)
    return rows.plan(TOP_K, problem, rung, ("x",), y)


def _fake(x: torch.Tensor, k: int, rung: str | None = None) -> torch.Tensor:
    _check(x, k)
    return torch.empty((*x.shape[:-1], 2 * k), dtype=torch.float32, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.k = inputs[:2]
    ctx.save_for_backward(x, output[..., ctx.k :].long())


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """The gradient of the probabilities, by PyTorch's softmax; class numbers do not change by little."""
    x, classes = ctx.saved_tensors
    probabilities = torch.softmax(x, -1, dtype=torch.float32)
    wanted = torch.zeros_like(probabilities).scatter(-1, classes, gradient[..., : ctx.k])
    return torch.ops.aten._softmax_backward_data(wanted, probabilities, -1, x.dtype), None, None


OPERATOR = define_planned(
    "top_k(Tensor x, int k, str? rung=None) -> Tensor", _plan, _fake, setup=_setup, backward=_backward
)
