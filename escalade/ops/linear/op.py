"""`linear` as a PyTorch operator."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_autocast, define_planned, require_alike
from escalade.ops.linear.operation import LINEAR
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.shared import rows

_SCHEMA = (
    "linear(Tensor x, Tensor weight, Tensor? bias=None, bool relu=False, bool tf32=False, str? rung=None) "
    "-> Tensor"
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return relu(x @ weight.T + bias); bias and relu are optional, x has any leading dimensions.

    `tf32` allows TF32 products for fp32 tensors; `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, weight, bias, relu, tf32, rung)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tf32: bool) -> None:
    """Check everything but the number of rows, which may be symbolic during tracing."""
    rows.check_matrix("linear", x)
    if weight.dim() != 2:
        raise UnsupportedError(
            f"weight has shape {tuple(weight.shape)}; it must be [features out, features in]"
        )
    require_alike(x, {"weight": weight, "bias": bias})
    if x.shape[-1] != weight.shape[1]:
        raise UnsupportedError(
            f"x has rows of {x.shape[-1]}, but weight {tuple(weight.shape)} takes {weight.shape[1]}"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise UnsupportedError(
            f"bias has shape {tuple(bias.shape)}; for {weight.shape[0]} features out it must be ({weight.shape[0]},)"
        )
    if tf32 and x.dtype != torch.float32:
        raise UnsupportedError(f"x has dtype {x.dtype}; tf32=True applies to float32 tensors only")


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias, tf32)
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    relu: bool,
    tf32: bool,
    rung: str | None,
) -> CallPlan:
    y = _fake(x, weight, bias, relu, tf32)
    out_features, in_features = weight.shape
    problem = LinearProblem(
        rows.rows_of(x), in_features, out_features, bias is not None, relu,
        "tf32" if tf32 else NAMES[x.dtype],
    )  # fmt: skip
    return rows.plan(LINEAR, problem, rung, ("x", "weight", "bias"), y)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, relu = inputs[:4]
    ctx.save_for_backward(x, weight, output if relu else None)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate with PyTorch's own products; there are only forward kernels."""
    x, weight, output = ctx.saved_tensors
    if output is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
    # Trailing arguments left at their defaults are omitted here too.
    need_x, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    flat = gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient @ weight if need_x else None,
        flat.mT @ x.reshape(-1, x.shape[-1]) if need_weight else None,
        flat.sum(0) if ctx.has_bias and need_bias else None,
        None,
        None,
        None,
    )


def _cast(
    dtype: torch.dtype,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> tuple[Any, ...]:
    """Cast like PyTorch's own operators; dtypes without kernels are left for the checks to report."""
    tensors = [one if one is None or one.dtype not in NAMES else one.to(dtype) for one in (x, weight, bias)]
    return *tensors, relu, tf32 and dtype == torch.float32, rung


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
define_autocast("linear", _cast)
