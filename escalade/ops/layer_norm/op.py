"""`layer_norm` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.layer_norm.operation import LAYER_NORM
from escalade.ops.layer_norm.problem import EPSILON, LayerNormProblem
from escalade.ops.shared import rows


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = EPSILON,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """The rows of the last dimension with mean 0 and variance 1, times weight, plus bias. `rung` names one rung."""
    return OPERATOR(x, weight, bias, epsilon, rung)


def _check(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    rows.check_matrix("layer_norm", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.device != x.device or tensor.shape != x.shape[-1:]:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; layer_norm takes {x.dtype} "
                f"{list(x.shape[-1:])} on {x.device}, as x is"
            )


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> Plan:
    _check(x, weight, bias)
    problem = LayerNormProblem(
        rows.rows_of(x), x.shape[-1], weight is not None, bias is not None, epsilon=epsilon,
        dtype=dtype_of("layer_norm", x),
    )  # fmt: skip
    given = ("x", "weight", "bias")
    return rows.plan(LAYER_NORM, problem, rung, given, torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.epsilon, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Takes the statistics again, which costs less than keeping them would, and leaves the rest to PyTorch."""
    x, weight, bias = ctx.saved_tensors
    sizes = list(x.shape[-1:])
    _, mean, scale = torch.ops.aten.native_layer_norm(x, sizes, weight, bias, ctx.epsilon)
    wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1],
              bias is not None and ctx.needs_input_grad[2]]  # fmt: skip
    found = torch.ops.aten.native_layer_norm_backward(
        gradient.contiguous(), x, sizes, mean, scale, weight, bias, wanted
    )
    return (*(part if asked else None for part, asked in zip(found, wanted, strict=True)), None, None)


OPERATOR = define_planned(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon, str? rung=None) -> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
)
