"""The problems of avg_pool2d: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.avg_pool2d.problem import AvgPool2dProblem

PROBLEMS = (
    AvgPool2dProblem(32, 288, 35, 35, (3, 3), (1, 1), (1, 1)),
    AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2)),
    AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2), prologue="relu(gain * x + shift)"),
)
"""What `escalade ladder avg_pool2d` measures: Inception's and DenseNet's."""

SMALL_PROBLEMS = (
    AvgPool2dProblem(2, 16, 9, 16, (3, 3), (1, 1), (1, 1)),
    AvgPool2dProblem(1, 8, 10, 10, (2, 2), (2, 2)),
    AvgPool2dProblem(2, 3, 11, 11, (3, 3), (2, 2), (1, 1), ceil_mode=True, count_padding=False),
    AvgPool2dProblem(1, 5, 6, 6, (2, 2), (3, 3), (1, 1), ceil_mode=True),
    AvgPool2dProblem(1, 24, 7, 17, (3, 5), (2, 3), (1, 2), divisor=7),
    AvgPool2dProblem(1, 8, 14, 14, (12, 12), (4, 4), (6, 6)),
    AvgPool2dProblem(1, 1, 1, 1, (1, 1), (1, 1)),
    AvgPool2dProblem(2, 12, 7, 5, (3, 3), (2, 2), (1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
    AvgPool2dProblem(2, 16, 7, 6, (3, 3), (2, 2), (1, 1), prologue="gate * (gain * x + shift)"),
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, every divisor,
kernels that are not square, odd sizes, parts of larger buffers, and a prologue that is not zero for zeros."""
