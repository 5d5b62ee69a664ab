"""What operations on the rows of a matrix share: their sizes, and how tensors of PyTorch reach them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.executables import aligned, ready
from escalade.ops.calling.library import require_rung

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


def run(
    operation: Operation[Any],
    problem: Problem,
    rung: str | None,
    inputs: Mapping[str, torch.Tensor | None],
    y: torch.Tensor,
) -> torch.Tensor:
    """`y`, filled. Inputs are made contiguous, so that leading dimensions are rows of one matrix."""
    if problem.batch == 0:
        require_rung(operation, rung)
        return y
    dense = {name: None if t is None else aligned(t.contiguous()) for name, t in inputs.items()}
    ready(operation, problem, y.device, rung).run({**dense, "y": y})
    return y
