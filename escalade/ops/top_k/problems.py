"""The problems of top_k: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.top_k.problem import TopKProblem

PROBLEMS = tuple(TopKProblem(batch, 1000, 5) for batch in (1, 32, 256, 10_000))

SMALL_PROBLEMS = (
    TopKProblem(5, 1000, 5),
    TopKProblem(3, 33, 4),
    TopKProblem(2, 2310, 32),
    TopKProblem(600, 24, 1),
    TopKProblem(3, 7, 7),
    TopKProblem(1, 1, 1),
)
"""Small problems that between them have one warp a row and several, all classes asked for, widths that no vector
divides, lists not filled."""
