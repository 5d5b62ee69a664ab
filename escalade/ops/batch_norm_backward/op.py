"""`batch_norm_backward` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.batch_norm_backward.operation import BATCH_NORM_BACKWARD
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem
from escalade.ops.calling.call import Plan, launched
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.shared.channels import check_numbers, laying_numbers
from escalade.ops.shared.images import check_images, empty_beside, laying, layout_of

_NAME = "batch_norm_backward"
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool = False,
    output: torch.Tensor | None = None,
    residual: bool = False,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of x, weight and bias in y = relu(batch_norm(x) + residual) in training, from that of y.

    `mean` and `rstd`, one over the deviation, are those of x, in float32, as `batch_norm_training` gives them. Behind a
    ReLU gradients pass where its `output` is positive; without `output` that is found again by x and bias, which is
    possible where no residual was added. With `residual` the residual's gradient is the fourth result. Always the same
    bits. `rung` names one rung of the ladder.
    """
    found = OPERATOR(gradient, x, weight, bias, mean, rstd, relu, output, residual, rung)
    return tuple(found[: 3 + residual])


def _fake(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool = False,
    output: torch.Tensor | None = None,
    residual: bool = False,
    rung: str | None = None,
) -> Gradients:
    check_images(_NAME, x)
    images = {"gradient": gradient, "output": output}
    require_alike(x, images)
    for name, tensor in images.items():
        if tensor is not None and tensor.shape != x.shape:
            raise UnsupportedError(
                f"{name} has shape {tuple(tensor.shape)}; it must be x's, {tuple(x.shape)}"
            )
    check_numbers(_NAME, x, {"weight": weight, "bias": bias, "mean": mean, "rstd": rstd})
    if residual and _mask(relu, output) != "output":
        raise UnsupportedError(
            "a residual's gradient without the output: behind a ReLU batch_norm_backward finds it by `output`, and "
            "without a ReLU it is the gradient itself"
        )
    grad_x = empty_beside(x, x.shape)
    of_weight, of_bias = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    of_residual = empty_beside(x, x.shape) if residual else x.new_empty(0)
    return grad_x, of_weight, of_bias, of_residual


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool,
    output: torch.Tensor | None,
    residual: bool,
    rung: str | None,
) -> Plan:
    results = _fake(gradient, x, weight, bias, mean, rstd, relu, output, residual)
    mask = _mask(relu, output)
    batch, channels, height, width = x.shape
    problem = BatchNormBackwardProblem(
        batch, channels, height, width, mask, residual, dtype_of(_NAME, x), layout_of(x)
    )
    images, numbers = laying(problem.layout), laying_numbers(x)
    lay = {
        **dict.fromkeys(("gradient", "x", "output"), images),
        **dict.fromkeys(("mean", "rstd"), numbers),
        "bias": numbers if mask == "x" else _absent,
        "weight": laying_numbers(x, 1.0),
    }
    names = ("y", "weight_gradient", "bias_gradient", "residual_gradient")
    return Plan(
        launched(BATCH_NORM_BACKWARD, problem, x.device, rung),
        dict(zip(names, results, strict=True)),
        lay,
        results=names,
    )


def _absent(bias: torch.Tensor | None) -> None:
    """A bias that is not asked for."""


def _mask(relu: bool, output: torch.Tensor | None) -> str:
    """Where it is found what a ReLU has cut off."""
    return "output" if output is not None else "x" if relu else "none"


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    gradient, x, weight, bias, mean, rstd, ctx.relu, of_relu, ctx.residual, _ = inputs
    ctx.save_for_backward(gradient, x, weight, bias, mean, rstd, of_relu)


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    """Differentiates PyTorch's own words for the same, which know that mean and rstd depend on x."""
    gradient, x, weight, bias, mean, rstd, output = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [
            None if one is None else one.detach().requires_grad_(one.is_floating_point())
            for one in (gradient, x, weight)
        ]
        before, again, scale = leaves
        if ctx.relu or output is not None:
            if output is None:
                factor = rstd if weight is None else weight.float() * rstd
                output = (x - mean.view(1, -1, 1, 1)) * factor.view(1, -1, 1, 1)
                output = (output if bias is None else output + bias.view(1, -1, 1, 1)).to(x.dtype)
            before = torch.ops.aten.threshold_backward(before, output, 0)
        found = torch.ops.aten.native_batch_norm_backward(
            before, again, scale, None, None, mean, rstd, True, 1e-5, [True, True, True]
        )
        results = [found[0], *(one.float() for one in found[1:]), *([before] if ctx.residual else [])]
        asked = [leaf for leaf in leaves if leaf is not None]
        of_leaves = iter(torch.autograd.grad(results, asked, gradients[: len(results)], allow_unused=True))
    return *(None if leaf is None else next(of_leaves) for leaf in leaves), *(None,) * 7


OPERATOR = define_planned(
    "batch_norm_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "bool relu=False, Tensor? output=None, bool residual=False, str? rung=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _plan, _fake, setup=_setup, backward=_backward,
)  # fmt: skip
