"""Error measures and tolerances."""

from __future__ import annotations

import math

import torch

SPLIT_ROUNDING = 2.0**-20
"""Error floor for fp32 operands split into two TF32 halves, for short sums. Tensor cores round toward zero at every
step, so these errors do not cancel."""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖result − expected‖ / ‖expected‖ in float64; NaN if a value is NaN or the shapes differ."""
    if result.shape != expected.shape:
        return math.nan
    norm = torch.linalg.vector_norm(expected.double())
    distance = torch.linalg.vector_norm(result.double() - expected.double())
    return float(distance / norm) if norm > 0 else float(distance)


def tf32_tolerance(dtype: str, products: int, tolerance: float) -> float:
    """Widen the tolerance of a TF32 problem, because PyTorch may compute its peer in fp32.

    TF32 rounds both operands to 11 bits, an error of 2.9e-4 on average and of up to 2^-10 in sums of few products.
    """
    if dtype != "tf32":
        return tolerance
    return max(tolerance, 2 * 2.9e-4 if products >= 256 else 2.0**-10)
