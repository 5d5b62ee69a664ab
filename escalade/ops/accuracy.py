"""How far a result is from what it should be."""

from __future__ import annotations

import torch


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """‖result − expected‖ / ‖expected‖ in float64; NaN if anything is not a number."""
    norm = torch.linalg.vector_norm(expected.double())
    distance = torch.linalg.vector_norm(result.double() - expected.double())
    return float(distance / norm) if norm > 0 else float(distance)
