"""What a loss of single elements is, and its gradient: by PyTorch, function by function."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.pointwise_loss.problem import PointwiseLossProblem


def random_inputs(problem: PointwiseLossProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates, targets between 0 and 1, and a scale of the gradient where there is one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    storage = STORAGE[problem.dtype]
    inputs = {
        "x": torch.randn(problem.elements, generator=generator, device=device).to(storage),
        "target": torch.rand(problem.elements, generator=generator, device=device).to(
            STORAGE[problem.target_dtype]
        ),
    }
    # Large enough that the gradients of a mean are no subnormal numbers in fp16.
    scale = torch.tensor([0.75 * (problem.elements if problem.reduction == "mean" else 1)], device=device)
    return {**inputs, "scale": scale} if problem.gradient else inputs


def empty_output(problem: PointwiseLossProblem, device: torch.device) -> torch.Tensor:
    if problem.gradient:
        return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)
    return torch.empty(1, device=device)


def exact(problem: PointwiseLossProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient, or without it the loss, in float64."""
    return (
        _gradient(problem, inputs, torch.float64)
        if problem.gradient
        else loss(problem, inputs, torch.float64)
    )


def peer(problem: PointwiseLossProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient or the loss by PyTorch: the gradient in the problem's dtype, the loss in fp32."""
    if problem.gradient:
        return _gradient(problem, inputs, STORAGE[problem.dtype])
    return loss(problem, inputs, torch.float32)


def loss(
    problem: PointwiseLossProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The loss in a dtype, one element."""
    terms = _results(problem, inputs, dtype)[0]
    return (terms.mean() if problem.reduction == "mean" else terms.sum()).reshape(1)


def _gradient(
    problem: PointwiseLossProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    return (_results(problem, inputs, dtype)[1] * (inputs["scale"].double() * problem.factor)).to(dtype)


def _results(
    problem: PointwiseLossProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    return problem.program.evaluate({name: inputs[name].to(dtype) for name in ("x", "target")})
