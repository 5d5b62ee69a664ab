"""What an image at another size is, and PyTorch's own answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from escalade.ops.shared.pooling import empty_output, random_inputs
from escalade.ops.upsample2d.problem import Upsample2dProblem

__all__ = ["empty_output", "exact", "gradient", "peer", "random_inputs", "resized"]

_aten: Any = torch.ops.aten
_FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "nearest": _aten.upsample_nearest2d,
    "nearest_exact": _aten._upsample_nearest_exact2d,
    "bilinear": _aten.upsample_bilinear2d,
    "bicubic": _aten.upsample_bicubic2d,
}
_BACKWARD: dict[str, Callable[..., torch.Tensor]] = {
    "nearest": _aten.upsample_nearest2d_backward,
    "nearest_exact": _aten._upsample_nearest_exact2d_backward,
    "bilinear": _aten.upsample_bilinear2d_backward,
    "bicubic": _aten.upsample_bicubic2d_backward,
}


def exact(problem: Upsample2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64; the nearest pixel is that of places in fp32, as PyTorch has it in every dtype."""
    x = inputs["x"]
    return _of(problem, x.float() if problem.taps == 1 else x.double()).double()


def peer(problem: Upsample2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result as PyTorch computes it on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    x = inputs["x"]
    return _of(problem, x if x.is_cuda else x.float()).to(x.dtype)


def _of(p: Upsample2dProblem, x: torch.Tensor) -> torch.Tensor:
    return resized(x, p.output, p.mode, p.corners, p.factors)


def resized(
    x: torch.Tensor, output: tuple[int, int], mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    """PyTorch's result, in x's dtype."""
    return _FORWARD[mode](x, output, *_settings(mode, corners, factors))


def gradient(
    of_y: torch.Tensor, size: torch.Size, mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    """PyTorch's gradient of x, which has that size."""
    return _BACKWARD[mode](of_y, of_y.shape[2:], size, *_settings(mode, corners, factors))


def _settings(mode: str, corners: bool, factors: tuple[float, float]) -> tuple[Any, ...]:
    given = tuple(factor or None for factor in factors)
    return given if mode.startswith("nearest") else (corners, *given)
