"""The problems of softmax: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.softmax.problem import SoftmaxProblem

PROBLEMS = (
    *(SoftmaxProblem(batch, 1000) for batch in (1, 32, 256, 10_000)),
    SoftmaxProblem(262_144, 64),
    SoftmaxProblem(64, 64, inner=4096),
)
"""Chances of classes, and of an image's channels in NHWC and in NCHW."""

SMALL_PROBLEMS = (
    SoftmaxProblem(5, 1000),
    SoftmaxProblem(3, 33),
    SoftmaxProblem(1, 2310),
    SoftmaxProblem(2, 33_002),
    SoftmaxProblem(600, 24),
    SoftmaxProblem(4, 1),
    SoftmaxProblem(2, 67, inner=40),
    SoftmaxProblem(1, 5, inner=9),
)
"""Small problems that between them have rows of one warp, of several, and too wide for registers; widths that no vector
divides; and rows that lie side by side."""
