"""What sums of filters are: by PyTorch, as means of windows without their divisor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.filter_sums.problem import FilterSumsProblem
from escalade.ops.shared.images import empty_images, stored_images

__all__ = ["empty_output", "exact", "peer", "random_inputs", "summed"]


def summed(x: torch.Tensor, zeros: bool) -> torch.Tensor:
    """PyTorch's result."""
    sums = F.avg_pool2d(x, 2, stride=1, padding=int(zeros), divisor_override=1)
    return sums.flip(2, 3).transpose(0, 1)


def random_inputs(problem: FilterSumsProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": stored_images(p, x)}


def peer(problem: FilterSumsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return summed(inputs["x"], problem.zeros)


def exact(problem: FilterSumsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return summed(inputs["x"].double(), problem.zeros)


def empty_output(problem: FilterSumsProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.channels, p.batch, p.rows, p.columns), device)
