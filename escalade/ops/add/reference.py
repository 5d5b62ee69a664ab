"""What a sum's result is: PyTorch's own, in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.add.problem import AddProblem
from escalade.ops.shared.pointwise import empty_output, random_input

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def random_inputs(problem: AddProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    return {name: random_input(problem, device, generator) for name in ("x", "residual")}


def exact(problem: AddProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: AddProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's result in the dtype of the inputs."""
    y = inputs["x"] + inputs["residual"]
    return y.relu_() if problem.relu else y
