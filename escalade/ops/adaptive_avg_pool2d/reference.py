"""What a mean over windows is, and PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.shared.pooling import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def exact(problem: AdaptiveAvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means in float64."""
    return F.adaptive_avg_pool2d(inputs["x"].double(), problem.output)


def peer(problem: AdaptiveAvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means as PyTorch computes them on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    x = inputs["x"]
    wide = x if x.is_cuda else x.float()
    return F.adaptive_avg_pool2d(wide, problem.output).to(x.dtype)
