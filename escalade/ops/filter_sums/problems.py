"""The problems of filter_sums: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.filter_sums.problem import FilterSumsProblem

PROBLEMS = (
    FilterSumsProblem(256, 128, 3, 3, zeros=True),
    FilterSumsProblem(128, 256, 4, 4),
    FilterSumsProblem(3, 256, 3, 3, zeros=True),
)
"""What `escalade ladder filter_sums` measures: a decoder's filters, their gradients, and those of its last layer."""

SMALL_PROBLEMS = (
    FilterSumsProblem(34, 40, 3, 2, zeros=True),
    FilterSumsProblem(3, 65, 2, 5),
)
"""Small problems that between them have parts of tiles both ways, zeros and none, and narrow and wide filters."""
