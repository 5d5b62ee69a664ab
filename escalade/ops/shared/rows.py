"""Operations on the rows of a matrix: sizes, checks, and conversion of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import CallPlan, prepare

LAYOUTS = ("flat",)


def check_fields(operation: str, problem: Any, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Check dtype, layout and batch, and that every size is between 1 and 2^30 - 1."""
    require(operation, "dtype", problem.dtype, dtypes)
    require(operation, "layout", problem.layout, LAYOUTS)
    if problem.batch < 0:
        raise UnsupportedError(f"{problem.batch} rows: the number must not be negative")
    require_at_least(1, sizes)
    for what, value in {"rows": problem.batch, **sizes}.items():
        if value >= 2**30:
            raise UnsupportedError(f"{value} {what}: {operation} supports fewer than 2^30; split them")


# --- tensors


def check_matrix(operation: str, x: torch.Tensor) -> None:
    if x.dim() < 1:
        raise UnsupportedError(f"x has no dimensions; {operation} needs at least one")
    dtype_of(operation, x)


def rows_of(x: torch.Tensor) -> int:
    """Return the product of all dimensions but the last."""
    return x.shape[:-1].numel()


def plan(
    operation: Operation[Any],
    problem: Problem,
    rung: str | None,
    inputs: Iterable[str],
    y: torch.Tensor,
) -> CallPlan:
    """Plan a result like `y`. Inputs are made contiguous, so that leading dimensions are rows of one matrix."""
    return CallPlan(prepare(operation, problem, y.device, rung), {"y": y}, dict.fromkeys(inputs, _dense))


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
