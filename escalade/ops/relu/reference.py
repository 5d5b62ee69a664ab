"""What a rectifier's result is: PyTorch's own, in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.relu.problem import ReluProblem
from escalade.ops.shared.pointwise import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def exact(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})


def peer(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's result in the dtype of the inputs."""
    x = inputs["x"]
    return torch.relu(x) if problem.limit is None else F.hardtanh(x, 0.0, problem.limit)
