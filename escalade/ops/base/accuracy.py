"""How far a result is from what it should be."""

from __future__ import annotations

import math

import torch

SPLIT_ROUNDING = 2.0**-20
"""What results may be off by whose fp32 operands are split into two TF32 parts, where few products are added up: tensor
cores round towards zero at every step, and these errors do not cancel."""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """‖result − expected‖ / ‖expected‖ in float64; NaN if anything is not a number, or the shapes differ."""
    if result.shape != expected.shape:
        return math.nan
    norm = torch.linalg.vector_norm(expected.double())
    distance = torch.linalg.vector_norm(result.double() - expected.double())
    return float(distance / norm) if norm > 0 else float(distance)


def tf32_tolerance(dtype: str, products: int, tolerance: float) -> float:
    """PyTorch may answer a TF32 problem in fp32. TF32 itself, both operands rounded to 11 bits, is off by 2.9e-4.

    That is a mean; of a few products all may be off by nearly as much as can be, 2^-10.
    """
    if dtype != "tf32":
        return tolerance
    return max(tolerance, 2 * 2.9e-4 if products >= 256 else 2.0**-10)
