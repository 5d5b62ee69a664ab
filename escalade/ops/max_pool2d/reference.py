"""What a maximum over windows is: PyTorch's, which is exact in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.shared.pooling import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def peer(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    p = problem
    return F.max_pool2d(inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode)


def exact(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The maxima in float64."""
    return peer(problem, {"x": inputs["x"].double()})
