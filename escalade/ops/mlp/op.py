"""`mlp` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_autocast, define_planned, require_alike, require_rung
from escalade.ops.calling.types import as_list
from escalade.ops.mlp.operation import MLP
from escalade.ops.mlp.problem import Layer, MlpProblem, parse_layers, spelled
from escalade.ops.shared import rows

_SCHEMA = "mlp(Tensor x, Tensor[] parameters, str layers, bool error=False, str? rung=None) -> Tensor"


def mlp(
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: Sequence[Layer] | str,
    *,
    error: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Apply a chain of `layers` to the last dimension of x, in one launch.

    `layers` is a sequence of `Layer`, or a string such as `5x64n-64bg_320-32`; `parameters` are their tensors, layer by
    layer: norm weight and bias if it has a norm, weight, and bias if it has one. With `error`, the result is the mean
    squared difference between each row and its reconstruction, in fp32. `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, as_list(parameters), spelled(layers), error, rung)


def _problem(x: torch.Tensor, layers: str, error: bool, batch: int) -> MlpProblem:
    return MlpProblem(batch, parse_layers(layers), "error" if error else "y", NAMES[x.dtype])


def _check(x: torch.Tensor, parameters: Sequence[torch.Tensor], layers: str, error: bool) -> MlpProblem:
    """Check everything but the number of rows, which may be symbolic during tracing; return the problem of one row."""
    rows.check_matrix("mlp", x)
    problem = _problem(x, layers, error, 1)
    if x.shape[-1] != problem.features:
        raise UnsupportedError(f"x has rows of {x.shape[-1]}, but {layers} takes {problem.features}")
    sizes = problem.sizes
    if len(parameters) != len(sizes):
        raise UnsupportedError(
            f"{len(parameters)} parameters, but {layers} takes {len(sizes)}: {', '.join(sizes)}"
        )
    named = dict(zip(sizes, parameters, strict=True))
    require_alike(x, dict(named))
    for name, tensor in named.items():
        if tuple(tensor.shape) != sizes[name]:
            raise UnsupportedError(f"{name} has shape {tuple(tensor.shape)}; it must be {sizes[name]}")
    return problem


def _fake(
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: str,
    error: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    row = _check(x, parameters, layers, error)
    last = () if error else (row.outputs,)
    return torch.empty((*x.shape[:-1], *last), dtype=torch.float32 if error else x.dtype, device=x.device)


def _plan(
    x: torch.Tensor, parameters: Sequence[torch.Tensor], layers: str, error: bool, rung: str | None
) -> CallPlan:
    y = _fake(x, parameters, layers, error)
    batch = rows.rows_of(x)
    if batch == 0:
        require_rung(MLP, rung)
        return CallPlan(None, {"y": y})
    problem = _problem(x, layers, error, batch)
    names = tuple(problem.sizes)
    return replace(rows.plan(MLP, problem, rung, ("x", *names), y), names=names)


def _cast(
    dtype: torch.dtype,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: str,
    error: bool = False,
    rung: str | None = None,
) -> tuple[Any, ...]:
    """Cast the tensors as autocast casts those of a linear layer. Norms, sums and the error are fp32 in any dtype."""
    first, *others = [one if one.dtype not in NAMES else one.to(dtype) for one in (x, *parameters)]
    return first, others, layers, error, rung


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
define_autocast("mlp", _cast)
