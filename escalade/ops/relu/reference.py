"""The rectifier and its gradient by PyTorch, in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.relu.problem import ReluProblem
from escalade.ops.shared.pointwise import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def exact(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: ReluProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's result in the dtype of the inputs."""
    limit = problem.limit
    if problem.backward:
        gradient, output = inputs["gradient"], inputs["output"]
        if limit is None:
            return torch.ops.aten.threshold_backward(gradient, output, 0)
        return torch.ops.aten.hardtanh_backward(gradient, output, 0.0, limit)
    x = inputs["x"]
    return torch.relu(x) if limit is None else F.hardtanh(x, 0.0, limit)
