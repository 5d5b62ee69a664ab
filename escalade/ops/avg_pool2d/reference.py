"""What a mean over windows is, and PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.avg_pool2d.problem import AvgPool2dProblem
from escalade.ops.shared import pooling, prologue
from escalade.ops.shared.pooling import empty_output

__all__ = ["empty_output", "exact", "peer", "random_inputs"]


def random_inputs(problem: AvgPool2dProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates."""
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    return pooling.random_inputs(problem, device, seed) | prologue.random_operands(problem, generator)


def exact(problem: AvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _pooled(problem, prologue.apply(problem.prologue, wide)["x"])


def peer(problem: AvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means as PyTorch computes them on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    x = prologue.apply(problem.prologue, inputs)["x"]
    return _pooled(problem, x if x.is_cuda else x.float()).to(x.dtype)


def _pooled(p: AvgPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, p.kernel, p.stride, p.padding, p.ceil_mode, p.count_padding, p.divisor or None)
