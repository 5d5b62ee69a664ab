"""`conv2d` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES, dtype_of
from escalade.ops.calling.call import CallPlan, outputs, prepare
from escalade.ops.calling.library import define_autocast, define_planned, require_alike
from escalade.ops.conv2d.operation import CONV2D
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared.images import MEMORY_FORMAT, layout_of, packer
from escalade.ops.shared.pooling import as_pair

_SCHEMA = (
    "conv2d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, int[2] stride=1, "
    "int[2] padding=0, int[2] dilation=1, int groups=1, bool relu=False, bool tf32=False, str? rung=None) -> Tensor"
)
_TF32_POSITION = 9


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return relu(conv2d(x, weight) + bias + residual); bias, residual and relu are optional.

    Shapes are PyTorch's. NCHW and channels_last inputs are used in place (the result has x's layout), others are
    copied first. `tf32` allows TF32 products for fp32 tensors; `rung` selects a rung of the ladder by name. CPU
    tensors run the same kernel on the twin.
    """
    return OPERATOR(
        x, weight, bias, residual, as_pair(stride, "stride"), as_pair(padding, "padding"),
        as_pair(dilation, "dilation"), groups, relu, tf32, rung,
    )  # fmt: skip


class _Call(NamedTuple):
    """Arguments of a call; PyTorch omits trailing arguments that have their defaults."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    dilation: Sequence[int] = (1, 1)
    groups: int = 1
    relu: bool = False
    tf32: bool = False
    rung: str | None = None


def problem_of(*arguments: Any) -> Conv2dProblem:
    """Return the problem for the arguments of a call, or raise if it is unsupported."""
    call = _Call(*arguments)
    x, weight, bias, residual, stride, padding, dilation, groups, relu, tf32, _ = call
    _check_tensors(call)
    batch, channels, height, width = x.shape
    filters, _, filter_height, filter_width = weight.shape
    problem = Conv2dProblem(
        batch, channels, height, width, filters, filter_height, filter_width,
        (stride[0], stride[-1]), (padding[0], padding[-1]), (dilation[0], dilation[-1]), groups,
        "tf32" if tf32 else NAMES[x.dtype], layout_of(x), bias is not None, residual is not None, relu,
    )  # fmt: skip
    expected = (batch, filters, problem.output_height, problem.output_width)
    if residual is not None and residual.shape != expected:
        raise UnsupportedError(
            f"residual has shape {tuple(residual.shape)}; it must have the output's shape, {expected}"
        )
    return problem


def _check_tensors(call: _Call) -> None:
    """Check everything but image and batch sizes, which may be symbolic during tracing."""
    x, weight, bias, residual, groups, tf32 = *call[:4], call.groups, call.tf32
    if x.dim() != 4 or weight.dim() != 4:
        raise UnsupportedError(
            f"x has {x.dim()} dimensions and weight {weight.dim()}; conv2d takes 4 each: x [N, C, H, W], "
            "weight [K, C/groups, R, S]"
        )
    dtype_of("conv2d", x)
    require_alike(x, {"weight": weight, "bias": bias, "residual": residual})
    if groups < 1 or x.shape[1] != weight.shape[1] * groups:
        raise UnsupportedError(
            f"x has {x.shape[1]} channels, but weight {tuple(weight.shape)} with groups={groups} takes "
            f"{weight.shape[1] * groups}"
        )
    if tf32 and x.dtype != torch.float32:
        raise UnsupportedError(f"x has dtype {x.dtype}; tf32=True applies to float32 tensors only")
    filters = weight.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != filters):
        raise UnsupportedError(
            f"bias has shape {tuple(bias.shape)}; for {filters} filters it must be ({filters},)"
        )
    if residual is not None and residual.dim() != 4:
        raise UnsupportedError(f"residual has shape {tuple(residual.shape)}; it must have the output's shape")


def _plan(*arguments: Any) -> CallPlan:
    call, problem = _Call(*arguments), problem_of(*arguments)
    prepared = prepare(CONV2D, problem, call.x.device, call.rung)
    form = problem if prepared is None else prepared.problem
    return CallPlan(
        prepared,
        outputs(CONV2D, form),
        dict.fromkeys(("x", "weight", "bias", "residual"), packer(form.layout)),
        finish=None if form.layout == problem.layout else packer(problem.layout),
    )


def _fake(*arguments: Any) -> torch.Tensor:
    call = _Call(*arguments)
    _check_tensors(call)
    x, weight, stride, padding, dilation = *call[:2], *call[4:7]
    size = [
        (x.shape[2 + d] + 2 * padding[d] - dilation[d] * (weight.shape[2 + d] - 1) - 1) // stride[d] + 1
        for d in (0, 1)
    ]
    return torch.empty(
        (x.shape[0], weight.shape[0], *size),
        dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT[layout_of(x)],
    )  # fmt: skip


def _cast(dtype: torch.dtype, *arguments: Any) -> tuple[Any, ...]:
    """Cast like PyTorch's own convolutions; dtypes without kernels are left for the checks to report."""
    call = _Call(*arguments)
    tensors = [one if one is None or one.dtype not in NAMES else one.to(dtype) for one in call[:4]]
    # tf32 applies to fp32 tensors, which these may no longer be.
    return (*tensors, *call[4:_TF32_POSITION], call.tf32 and dtype == torch.float32, call.rung)


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
define_autocast("conv2d", _cast)
