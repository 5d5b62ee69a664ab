"""The problems of softmax: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.softmax.problem import SoftmaxProblem

PROBLEMS = tuple(SoftmaxProblem(batch, 1000) for batch in (1, 32, 256, 10_000))

SMALL_PROBLEMS = (
    SoftmaxProblem(5, 1000),
    SoftmaxProblem(3, 33),
    SoftmaxProblem(1, 2310),
    SoftmaxProblem(2, 33_002),
    SoftmaxProblem(600, 24),
    SoftmaxProblem(4, 1),
)
"""Small problems that between them have rows of one warp, of several, and too wide for registers; widths that no vector
divides."""
