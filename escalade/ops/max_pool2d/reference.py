"""What a maximum over windows is: PyTorch's, which is exact in every dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from escalade.ops.max_pool2d.problem import NOWHERE, MaxPool2dProblem
from escalade.ops.shared.images import MEMORY_FORMAT
from escalade.ops.shared.pooling import empty_output, random_inputs

__all__ = ["corners", "empty_output", "exact", "indices_of", "peer", "random_inputs", "to_places"]


def peer(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The maxima; where places are asked for, PyTorch finds them too, in 64 bits each."""
    p = problem
    if p.places:
        found = F.max_pool2d(
            inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode, return_indices=True
        )
        return found[0]
    return F.max_pool2d(inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode)


def exact(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The maxima in float64."""
    return peer(problem, {"x": inputs["x"].double()})


# --- the places of maxima


def indices_of(f: MaxPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    """For each output, the pixel of its maximum, counted in the image row by row."""
    found = F.max_pool2d(x, f.kernel, f.stride, f.padding, f.dilation, f.ceil_mode, return_indices=True)
    return found[1]


def corners(
    windows: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of each window's first tap, for a tensor with an element a window."""
    rows, columns = (
        torch.arange(windows.shape[2 + d], device=windows.device) * stride[d] - padding[d] for d in (0, 1)
    )
    return rows.view(-1, 1), columns


def to_places(f: MaxPool2dProblem, indices: torch.Tensor) -> torch.Tensor:
    """Places in the window, a byte each, of pixels in the image."""
    top, left = corners(indices, f.stride, f.padding)
    rows = (indices.div(f.width, rounding_mode="floor") - top).div(f.dilation[0], rounding_mode="floor")
    columns = (indices % f.width - left).div(f.dilation[1], rounding_mode="floor")
    return (rows * f.kernel[1] + columns).to(torch.uint8)


def further_outputs(problem: MaxPool2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
    if not problem.places:
        return {}
    p = problem
    size = (p.batch, p.channels, p.output_height, p.output_width)
    places = torch.empty(size, dtype=torch.uint8, device=device, memory_format=MEMORY_FORMAT[p.layout])
    return {"places": places}


def further_references(
    problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The places as numbers in float64."""
    if not problem.places:
        return {}
    places = to_places(problem, indices_of(problem, inputs["x"]))
    if problem.behind_relu:
        places = torch.where(exact(problem, inputs) <= 0, NOWHERE, places)
    return {"places": places.double()}
