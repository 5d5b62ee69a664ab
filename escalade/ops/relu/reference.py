"""What a rectifier's result is: PyTorch's own, in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.relu.problem import ReluProblem
from escalade.ops.shared.pointwise import empty_output, random_input

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def random_inputs(problem: ReluProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    return {"x": random_input(problem, device, generator)}


def exact(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})


def peer(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's result in the dtype of the inputs."""
    x = inputs["x"]
    return torch.relu(x) if problem.limit is None else F.hardtanh(x, 0.0, problem.limit)
