"""The problems of batch_statistics: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.batch_statistics.problem import BatchStatisticsProblem

PROBLEMS = (
    BatchStatisticsProblem(32, 64, 112, 112),
    BatchStatisticsProblem(256, 64, 112, 112),
    BatchStatisticsProblem(32, 64, 56, 56),
    BatchStatisticsProblem(256, 64, 56, 56),
    BatchStatisticsProblem(32, 512, 7, 7),
    BatchStatisticsProblem(256, 512, 7, 7),
)

SMALL_PROBLEMS = (
    BatchStatisticsProblem(2, 8, 6, 6),
    BatchStatisticsProblem(3, 16, 7, 7, epsilon=1e-3, momentum=0.25),
    BatchStatisticsProblem(1, 3, 5, 9),
    BatchStatisticsProblem(2, 24, 9, 4, epsilon=1e-5),  # 3 packs a row: threads left over
    BatchStatisticsProblem(5, 40, 1, 1),  # alike in both layouts
    BatchStatisticsProblem(1, 4, 1, 1),  # one element a channel: a variance of 0
    BatchStatisticsProblem(1, 2056, 2, 2),  # wider than a block
    BatchStatisticsProblem(2, 16, 64, 64, momentum=0.1),  # several splits
)
