"""What the gradient of a mean is: PyTorch's in float64, and its own to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem
from escalade.ops.shared.images import MEMORY_FORMAT
from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.pooling import random_gradient

__all__ = ["empty_output", "exact", "peer", "random_inputs"]

Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: AvgPool2dBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    return {"gradient": random_gradient(problem, device, seed)}


def exact(problem: AvgPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in float64."""
    return _backward(problem, inputs["gradient"].double())


def peer(problem: AvgPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch in the problem's dtype, as it does it on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    gradient = inputs["gradient"]
    return _backward(problem, gradient if gradient.is_cuda else gradient.float()).to(gradient.dtype)


def _backward(problem: AvgPool2dBackwardProblem, gradient: torch.Tensor) -> torch.Tensor:
    """PyTorch wants to know only the shape and the layout of x. Its kernel for NHWC forgets the padding on a GPU
    (pytorch/pytorch#188344), so where there is some it is given NCHW."""
    f = problem.forward
    memory_format = MEMORY_FORMAT["nchw" if any(f.padding) else problem.layout]
    gradient = gradient.contiguous(memory_format=memory_format)
    size = (f.batch, f.channels, f.height, f.width)
    x = torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format)
    backward: Any = torch.ops.aten.avg_pool2d_backward
    result: torch.Tensor = backward(
        gradient, x, f.kernel, f.stride, f.padding, f.ceil_mode, f.count_padding, f.divisor or None
    )
    return result
