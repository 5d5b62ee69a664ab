"""What a padded image is: PyTorch's, which is exact in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.pad2d.problem import Pad2dProblem
from escalade.ops.shared.pooling import empty_output, random_inputs

__all__ = ["empty_output", "exact", "padded", "peer", "random_inputs"]


def padded(x: torch.Tensor, pads: tuple[int, int, int, int], mode: str, value: float) -> torch.Tensor:
    """PyTorch's result; its pads begin with the last dimension."""
    top, bottom, left, right = pads
    constant = {"value": value} if mode == "constant" else {}
    return F.pad(x, (left, right, top, bottom), mode, **constant)


def peer(problem: Pad2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return padded(inputs["x"], problem.pads, problem.mode, problem.value)


def exact(problem: Pad2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})
