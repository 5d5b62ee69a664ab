"""What the gradient of a maximum is: PyTorch's in float64, and its own to be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from escalade.ops.max_pool2d.problem import NOWHERE, MaxPool2dProblem
from escalade.ops.max_pool2d.reference import corners, indices_of, to_places
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.shared import pooling
from escalade.ops.shared.images import MEMORY_FORMAT
from escalade.ops.shared.pooling import empty_input as empty_output

__all__ = ["empty_output", "exact", "from_places", "peer", "random_inputs"]

Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: MaxPool2dBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """`indices` are what PyTorch's forward pass keeps; only the peer reads them."""
    f = problem.forward
    x = pooling.random_inputs(f, device, seed)["x"]
    indices = indices_of(f, x)
    kept = {"places": to_places(f, indices)} if problem.stored else {"x": x}
    return {"gradient": pooling.random_gradient(problem, device, seed + 1), **kept, "indices": indices}


def from_places(
    places: torch.Tensor,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in the image of places in the window, and which of them count; the others are some pixel."""
    top, left = corners(places, stride, padding)
    counts = places != NOWHERE
    taps = places.long()
    rows = top + taps.div(kernel[1], rounding_mode="floor") * dilation[0]
    columns = left + taps % kernel[1] * dilation[1]
    return torch.where(counts, rows * width + columns, 0), counts


def exact(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in float64."""
    f, gradient = problem.forward, inputs["gradient"].double()
    if problem.stored:
        pixels, counts = from_places(inputs["places"], f.width, f.kernel, f.stride, f.padding, f.dilation)
        planes = gradient.new_zeros(f.batch, f.channels, f.pixels)
        planes.scatter_add_(2, pixels.flatten(2), torch.where(counts, gradient, 0.0).flatten(2))
        return planes.view(f.batch, f.channels, f.height, f.width)
    x = inputs["x"].double()
    return _finish(problem, _backward(f, gradient, x, indices_of(f, x)), x)


def peer(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch in the problem's dtype, by the indices that its forward pass keeps, then the ReLU's backward pass; on a
    CPU, which sums in 16 bits, of fp32 tensors."""
    gradient = inputs["gradient"]
    wide = gradient if gradient.is_cuda else gradient.float()
    f = problem.forward
    x = inputs.get("x")
    if x is None:  # only its shape and layout count
        x = torch.empty(
            (f.batch, f.channels, f.height, f.width),
            dtype=wide.dtype, device=wide.device, memory_format=MEMORY_FORMAT[problem.layout],
        )  # fmt: skip
    x = x.to(wide.dtype)
    return _finish(problem, _backward(f, wide, x, inputs["indices"]), x).to(gradient.dtype)


def _backward(
    f: MaxPool2dProblem, gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
    result: torch.Tensor = backward(
        gradient, x, f.kernel, f.stride, f.padding, f.dilation, f.ceil_mode, indices
    )
    return result


def _finish(problem: MaxPool2dBackwardProblem, dx: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(dx, x, 0) if problem.mask else dx
