"""What the gradients of batch normalisation are: the formulas in float64, and PyTorch's own to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem
from escalade.ops.expressions import Expression
from escalade.ops.shared.images import empty_images, stored_images

Tensors = Mapping[str, torch.Tensor]
_MARGIN = 0.05
"""How far outputs are from 0, where a rounding would let a gradient through or not."""


def _each(channelwise: torch.Tensor) -> torch.Tensor:
    return channelwise.view(1, -1, 1, 1)


def random_inputs(
    problem: BatchNormBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ; where a mask is found by x, no output is near 0."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (p.batch, p.channels, p.height, p.width)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    mean, bias = normal(p.channels), normal(p.channels)
    rstd = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    weight = (
        torch.rand(p.channels, generator=generator, device=device).add_(0.5).mul_(normal(p.channels).sign())
    )
    inputs = {"gradient": stored_images(p, normal(*size)), "weight": weight, "mean": mean, "rstd": rstd}
    outputs = normal(*size).add_(_each(bias))
    if p.mask == "x":
        outputs = torch.where(outputs.abs() < _MARGIN, 1.0, outputs)
        inputs["bias"] = bias
    if p.mask == "output":
        inputs["output"] = stored_images(p, outputs.relu())
    x = (outputs - _each(bias)) / _each(weight * rstd) + _each(mean)
    return {"x": stored_images(p, x), **inputs}


def empty_output(problem: BatchNormBackwardProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def masked(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in front of the ReLU or another function, in the dtype of the gradient."""
    gradient = inputs["gradient"]
    if problem.mask == "none":
        return gradient
    if problem.mask == "output":
        output = inputs["output"]
    else:
        scale = _each(inputs["weight"] * inputs["rstd"])
        output = (inputs["x"] - _each(inputs["mean"])) * scale + _each(inputs["bias"])
        if problem.function:
            values = {"gradient": gradient, "x": output}
            return Expression.parse(problem.function).evaluate(values)[0].to(gradient.dtype)
        output = output.to(gradient.dtype)
    found: torch.Tensor = torch.ops.aten.threshold_backward(gradient, output, 0)
    return found


def gradients(
    problem: BatchNormBackwardProblem, inputs: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    before, rstd = masked(problem, wide), _each(wide["rstd"])
    normalised = (wide["x"] - _each(wide["mean"])) * rstd
    weight_gradient, bias_gradient = (before * normalised).sum((0, 2, 3)), before.sum((0, 2, 3))
    means = (_each(sums / problem.count) for sums in (bias_gradient, weight_gradient))
    centred = before - next(means) - normalised * next(means)
    return centred * rstd * _each(wide["weight"]), weight_gradient, bias_gradient


def exact(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient of x in float64."""
    return gradients(problem, inputs)[0]


def peer(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient of x by PyTorch, the ReLU's and then the normalisation's; on a CPU of fp32 tensors."""
    on_gpu = inputs["x"].is_cuda
    given = inputs if on_gpu else {name: tensor.float() for name, tensor in inputs.items()}
    found: tuple[torch.Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        masked(problem, given), given["x"], given["weight"], None, None, given["mean"], given["rstd"], True, 1e-5,
        [True, True, True],
    )  # fmt: skip
    return found[0].to(STORAGE[problem.dtype])
