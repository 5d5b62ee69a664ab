"""`batch_norm` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the twin.

`batch_norm` updates its running statistics, and an operator that changes its arguments can have no
gradient of its own; so it is put together from two that change nothing, `batch_norm_inference` and
`batch_norm_training`, which has a folder and a ladder of its own.
"""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.batch_norm.operation import BATCH_NORM
from escalade.ops.batch_norm.problem import DEFAULT_EPSILON, BatchNormProblem
from escalade.ops.calling.call import Plan, launched
from escalade.ops.calling.library import define_planned, library, operator, require_alike
from escalade.ops.shared.channels import check_numbers, laying_numbers
from escalade.ops.shared.images import check_images, empty_beside, laying, layout_of

Optional = torch.Tensor | None


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """relu(batch_norm(x) + residual), residual and relu optional; otherwise torch.nn.functional.batch_norm.

    With `training` the batch's own statistics are taken, and the running ones, if there are any, moved
    towards them in place by `momentum` (the variance unbiased). x is [N, C, H, W], NCHW or
    channels_last; `rung` names a rung of the ladder of `batch_norm`, with `training` of `batch_norm_training`.
    """
    run = torch.ops.escalade.batch_norm if torch.compiler.is_compiling() else _batch_norm
    return run(x, weight, bias, running_mean, running_var, training, momentum, eps, relu, residual, rung)


# --- tensors to problems


def _check(x: torch.Tensor, channelwise: dict[str, Optional], residual: Optional) -> None:
    check_images("batch_norm", x)
    require_alike(x, {"residual": residual})
    if residual is not None and residual.shape != x.shape:
        raise UnsupportedError(
            f"residual has shape {tuple(residual.shape)}; it must be x's, {tuple(x.shape)}"
        )
    check_numbers("batch_norm", x, channelwise)


# --- normalisation


def _fake(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: Optional = None,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}, residual)
    return empty_beside(x, x.shape)


def _plan(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    relu: bool,
    residual: Optional,
    rung: str | None,
) -> Plan:
    y = _fake(x, weight, bias, mean, variance, eps, relu, residual)
    batch, channels, height, width = x.shape
    problem = BatchNormProblem(
        batch, channels, height, width, relu, residual is not None, dtype_of("batch_norm", x), layout_of(x), eps
    )  # fmt: skip
    images, numbers = laying(problem.layout), laying_numbers(x)
    return Plan(
        launched(BATCH_NORM, problem, x.device, rung, problem.elements),
        {"y": y},
        {
            **dict.fromkeys(("x", "residual"), images),
            **dict.fromkeys(("bias", "mean", "variance"), numbers),
            "weight": laying_numbers(x, 1.0),
        },
    )


def _setup_inference(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, _, mean, variance, ctx.eps, relu, residual, _ = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x, weight, mean, variance, output if relu else None)


def _backward_inference(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weight, mean, variance, y = ctx.saved_tensors
    if y is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    # The saved statistics are not looked at, but some of PyTorch's kernels want them to be there.
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, variance, mean, variance, False, ctx.eps, _needed(ctx)
    )
    return (
        grad_x,
        grad_weight,
        grad_bias,
        None,
        None,
        None,
        None,
        gradient if ctx.has_residual else None,
        None,
    )


def _needed(ctx):  # type: ignore[no-untyped-def]
    """Whether gradients of x, weight and bias are needed."""
    return list(ctx.needs_input_grad[:3])


# --- both, as PyTorch has it


def _batch_norm(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: Optional = None,
    rung: str | None = None,
) -> torch.Tensor:
    if not training:
        if running_mean is None or running_var is None:
            raise UnsupportedError("without training, batch_norm needs running_mean and running_var")
        return INFERENCE(x, weight, bias, running_mean, running_var, eps, relu, residual, rung)
    y, _, _, *moved = operator("batch_norm_training")(
        x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung
    )
    if running_mean is not None and running_var is not None:
        torch._foreach_copy_([running_mean, running_var], moved)
    return y


INFERENCE = define_planned(
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor variance, float eps=1e-05, "
    "bool relu=False, Tensor? residual=None, str? rung=None) -> Tensor",
    _plan, _fake, setup=_setup_inference, backward=_backward_inference,
)  # fmt: skip
library.define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "bool training=False, float momentum=0.1, float eps=1e-05, bool relu=False, Tensor? residual=None, "
    "str? rung=None) -> Tensor"
)
library.impl("batch_norm", _batch_norm, "CompositeImplicitAutograd")
