"""The problems of relu: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.relu.problem import ReluProblem

PROBLEMS = (
    ReluProblem(802_816),
    ReluProblem(6_422_528),
    ReluProblem(25_690_112),
    ReluProblem(51_380_224),
    ReluProblem(51_380_224, 6.0),
    ReluProblem(205_520_896),
    ReluProblem(51_380_224, backward=True),
)
"""ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256; the gradient at 56²."""

SMALL_PROBLEMS = (
    ReluProblem(1),
    ReluProblem(7, 6.0),
    ReluProblem(1000),
    ReluProblem(8 * 1024),
    ReluProblem(9001, 6.0),
    ReluProblem(4099, 0.3),
    ReluProblem(9001, backward=True),
    ReluProblem(1000, 6.0, backward=True),
)
