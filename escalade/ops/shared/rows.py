"""What operations on the rows of a matrix share: their sizes, and how tensors of PyTorch reach them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import Plan, launched

LAYOUTS = ("flat",)


def check_fields(operation: str, problem: Any, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Checks a problem: its dtype, layout and batch, and that every size is at least 1 and counts in 30 bits."""
    require(operation, "dtype", problem.dtype, dtypes)
    require(operation, "layout", problem.layout, LAYOUTS)
    if problem.batch < 0:
        raise UnsupportedError(f"{problem.batch} rows: there cannot be fewer than none")
    require_at_least(1, sizes)
    for what, value in {"rows": problem.batch, **sizes}.items():
        if value >= 2**30:
            raise UnsupportedError(f"{value} {what}: {operation} takes fewer than 2^30; split them")


# --- tensors


def check_matrix(operation: str, x: torch.Tensor) -> None:
    if x.dim() < 1:
        raise UnsupportedError(f"x has no dimensions; {operation} works along the last of at least one")
    dtype_of(operation, x)


def rows_of(x: torch.Tensor) -> int:
    """How many rows there are, whatever dimensions they are arranged in."""
    return x.shape[:-1].numel()


def plan(
    operation: Operation[Any],
    problem: Problem,
    rung: str | None,
    inputs: Iterable[str],
    y: torch.Tensor,
) -> Plan:
    """A result like `y`. Inputs are made contiguous, so that leading dimensions are rows of one matrix."""
    return Plan(launched(operation, problem, y.device, rung), {"y": y}, dict.fromkeys(inputs, _dense))


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
