"""What a sum's result is: PyTorch's own, in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.add.problem import AddProblem
from escalade.ops.shared.pointwise import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def exact(problem: AddProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: AddProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's result in the dtype of the inputs."""
    y = inputs["x"] + inputs["residual"]
    return y.relu_() if problem.relu else y
