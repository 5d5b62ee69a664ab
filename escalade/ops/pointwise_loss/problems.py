"""The problems of pointwise_loss: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.pointwise_loss.problem import PointwiseLossProblem

MSE = "d = x - target; d * d, 2 * d"
"""Squared differences."""
_LOGISTIC = "relu(x) - x * target + log1p(exp(-abs(x))), sigmoid(x) - target"
"""The binary cross-entropy of logits."""

PROBLEMS = tuple(
    PointwiseLossProblem(elements, MSE, gradient=gradient)
    for elements in (256 * 3 * 32 * 32, 2**25)
    for gradient in (False, True)
)
"""The error of a batch of small images, and of a tensor that no cache holds."""

SMALL_PROBLEMS = (
    PointwiseLossProblem(1, MSE),
    PointwiseLossProblem(9001, MSE, "sum"),
    PointwiseLossProblem(2053, MSE, gradient=True),
    PointwiseLossProblem(6000, MSE, gradient=True, dtype="fp16", target="fp32"),
    PointwiseLossProblem(515, _LOGISTIC, "sum", gradient=True),
)
"""Small problems that between them have several blocks, a part of one and of a pack, both reductions, and a
target of another type."""
