"""The problems of upsample2d: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.upsample2d.problem import MODES, Upsample2dProblem

PROBLEMS = tuple(Upsample2dProblem(32, 64, 56, 56, (112, 112), mode) for mode in MODES)
"""What `escalade ladder upsample2d` measures: a decoder's, by every mode."""

SMALL_PROBLEMS = (
    *(Upsample2dProblem(2, 16, 5, 7, (10, 14), mode) for mode in MODES),
    Upsample2dProblem(1, 3, 5, 6, (10, 12), "bilinear"),
    Upsample2dProblem(1, 12, 7, 5, (3, 11), "bilinear", corners=True),
    Upsample2dProblem(1, 3, 4, 6, (9, 1), "bicubic", corners=True),
    Upsample2dProblem(1, 8, 5, 5, (6, 13), "bilinear", factors=(1.3, 2.7)),
    Upsample2dProblem(1, 5, 7, 6, (16, 16), "nearest", factors=(2.3, 2.7)),
    Upsample2dProblem(2, 5, 9, 10, (4, 7), "nearest_exact"),
    Upsample2dProblem(2, 8, 1, 1, (3, 5), "bicubic"),
    Upsample2dProblem(1, 12, 3, 3, (6, 6), "bilinear", layout="nhwc", x_pitch=24, y_pitch=40),
)
"""Small problems that between them have every mode, both rules for corners, factors of their own, results that are
larger, smaller and one pixel, odd channels, and parts of larger buffers."""
