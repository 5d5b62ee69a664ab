"""What a pixel shuffle is: PyTorch's, which is exact in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.shared.images import empty_images
from escalade.ops.shared.pooling import random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs", "shuffled"]


def shuffled(x: torch.Tensor, factor: int, down: bool) -> torch.Tensor:
    """PyTorch's result."""
    return F.pixel_unshuffle(x, factor) if down else F.pixel_shuffle(x, factor)


def peer(problem: PixelShuffleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return shuffled(inputs["x"], problem.factor, problem.down)


def exact(problem: PixelShuffleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})


def empty_output(problem: PixelShuffleProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.output_channels, p.output_height, p.output_width), device)
