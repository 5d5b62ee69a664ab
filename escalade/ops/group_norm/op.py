"""`group_norm` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_rung
from escalade.ops.group_norm.operation import GROUP_NORM
from escalade.ops.group_norm.problem import EPSILON, GroupNormProblem
from escalade.ops.group_norm.reference import empty_output
from escalade.ops.shared.images import check_images, empty_beside, laid_out, layout_of


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = EPSILON,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Each image's groups of channels with mean 0 and variance 1, times weight, plus bias: one of both a channel.

    x is [N, C, H, W], in either layout. With as many groups as channels it is instance normalisation. `rung` names one
    rung.
    """
    return OPERATOR(x, groups, weight, bias, epsilon, rung)


def _check(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_images("group_norm", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.device != x.device or tensor.shape != x.shape[1:2]:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; group_norm takes {x.dtype} "
                f"{list(x.shape[1:2])} on {x.device}, as x is"
            )


def _run(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias)
    batch, channels, height, width = x.shape
    problem = GroupNormProblem(
        batch,
        channels,
        height,
        width,
        groups,
        weight is not None,
        bias is not None,
        epsilon=epsilon,
        dtype=dtype_of("group_norm", x),
        layout=layout_of(x),
    )
    y = empty_output(problem, x.device)
    if problem.elements == 0:
        require_rung(GROUP_NORM, rung)
    else:
        constants = {"weight": weight, "bias": bias}
        given = {name: None if t is None else aligned(t.contiguous()) for name, t in constants.items()}
        ready(GROUP_NORM, problem, x.device, rung).run({"x": laid_out(x, problem.layout), **given, "y": y})
    return y


def _fake(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias)
    return empty_beside(x, x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.groups, weight, _, ctx.epsilon, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Takes the statistics again, which costs less than keeping them would, and leaves the rest to PyTorch."""
    x, weight = ctx.saved_tensors
    batch, channels, height, width = x.shape
    sizes = (batch, channels, height * width, ctx.groups)
    dense = x.contiguous()
    _, mean, scale = torch.ops.aten.native_group_norm(dense, weight, None, *sizes, ctx.epsilon)
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
    found = torch.ops.aten.native_group_norm_backward(
        gradient.contiguous(), dense, mean, scale, weight, *sizes, wanted
    )
    of_x, of_weight, of_bias = (part if asked else None for part, asked in zip(found, wanted, strict=True))
    return of_x, None, of_weight, of_bias, None, None


OPERATOR = define(
    "group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float epsilon, str? rung=None) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
