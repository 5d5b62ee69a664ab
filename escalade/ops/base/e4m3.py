"""E4M3, the 8-bit float of FP8, in PyTorch as the kernels have it."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, ties to even; what is larger than 448 becomes 448, a NaN stays one.

    It clamps: PyTorch's own conversion makes NaN of what is too large, or not, depending on its version.
    """
    return values.float().clamp(-LARGEST, LARGEST).to(E4M3)
