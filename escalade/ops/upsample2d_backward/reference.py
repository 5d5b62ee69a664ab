"""What the gradient of an image at another size is, by the weights of the forward pass, and PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.pooling import random_gradient
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d.reference import gradient as of_input
from escalade.ops.upsample2d.reference import resized
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

__all__ = ["empty_output", "exact", "peer", "random_inputs", "weights"]

Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: Upsample2dBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    return {"gradient": random_gradient(problem, device, seed)}


def exact(problem: Upsample2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in float64."""
    gradient = inputs["gradient"].double()
    down, along = (weights(problem.forward, axis, gradient.device) for axis in (0, 1))
    return down.T @ gradient @ along


def weights(f: Upsample2dProblem, axis: int, device: torch.device) -> torch.Tensor:
    """The weight of every pixel along an axis in every output: what becomes of images with one pixel that is not 0.

    The nearest pixel is that of places in fp32, as PyTorch has it in every dtype.
    """
    size, outputs, factor = (f.height, f.width)[axis], f.output[axis], f.factors[axis]
    dtype = torch.float32 if f.taps == 1 else torch.float64
    image = torch.eye(size, dtype=dtype, device=device).view(1, size, size, 1)
    result = resized(image, (outputs, 1), f.mode, f.corners, (factor, 0.0))
    return result.view(size, outputs).T.double()


def peer(problem: Upsample2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch in the problem's dtype, as it does it on a GPU; on a CPU, of fp32 tensors."""
    f, gradient = problem.forward, inputs["gradient"]
    wide = gradient if gradient.is_cuda else gradient.float()
    size = torch.Size((f.batch, f.channels, f.height, f.width))
    return of_input(wide, size, f.mode, f.corners, f.factors).to(gradient.dtype)
