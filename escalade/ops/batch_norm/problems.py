"""The problems of batch_norm: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.batch_norm.problem import BatchNormProblem

PROBLEMS = (
    BatchNormProblem(32, 64, 112, 112, relu=True),
    BatchNormProblem(256, 64, 112, 112, relu=True),
    BatchNormProblem(32, 64, 56, 56, relu=True),
    BatchNormProblem(32, 64, 56, 56, relu=True, residual=True),
    BatchNormProblem(256, 64, 56, 56),
    BatchNormProblem(256, 64, 56, 56, relu=True),
    BatchNormProblem(256, 64, 56, 56, relu=True, residual=True),
    BatchNormProblem(32, 512, 7, 7, relu=True, residual=True),
    BatchNormProblem(256, 512, 7, 7, relu=True, residual=True),
)
"""ResNet-18: its first stage, and its last."""

SMALL_PROBLEMS = (
    BatchNormProblem(2, 8, 6, 6, relu=True),
    BatchNormProblem(3, 16, 7, 7, relu=True, residual=True),  # packs over two planes; a tail in nchw
    BatchNormProblem(1, 3, 5, 9),  # one channel a thread in nhwc
    BatchNormProblem(2, 24, 4, 4, relu=True, residual=True, epsilon=1e-3),  # 3 packs a row: threads left over
    BatchNormProblem(5, 40, 1, 1),  # alike in both layouts
    BatchNormProblem(2, 6, 3, 2),  # planes smaller than a pack of fp16
    BatchNormProblem(1, 2056, 2, 4),  # wider than a block
    BatchNormProblem(2, 64, 24, 24, residual=True),
    BatchNormProblem(
        2, 20, 5, 5, relu=True, residual=True, layout="nhwc", x_pitch=32, residual_pitch=24, y_pitch=40
    ),
)
