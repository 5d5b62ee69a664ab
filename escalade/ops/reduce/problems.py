"""The problems of reduce: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.reduce.problem import ReduceProblem

PROBLEMS = (
    ReduceProblem("max", 32, 3136, 256),
    ReduceProblem("mean", 100_352, 96),
    ReduceProblem("sum", 32, 802_816, before="x * x", activation="sqrt(x)"),
    ReduceProblem("var", 1, 100_352, 64, correction=1.0),
    ReduceProblem("logsumexp", 10_000, 1000),
)
"""The largest of each channel of an image, the mean of its channels, the length of all that an image is, the variance
of a channel in a batch, and what a logarithm of softmax takes."""

SMALL_PROBLEMS = (
    ReduceProblem("sum", 3, 5, 7),
    ReduceProblem("mean", 37, 24),
    ReduceProblem("max", 2, 70, 24),
    ReduceProblem("min", 5, 33),
    ReduceProblem("var", 1, 300, 64, correction=1.0),
    ReduceProblem("var", 3, 96, before="abs(x)"),
    ReduceProblem("logsumexp", 4, 1000),
    ReduceProblem("logsumexp", 2, 40, 8),
    ReduceProblem("sum", 1, 20_480, before="x * x", relu=True),
)
"""Small problems that between them have rows of a part of a warp, of a block and of several; columns of one block and
of several; and expressions on both sides."""
