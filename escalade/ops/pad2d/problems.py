"""The problems of pad2d: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.pad2d.problem import Pad2dProblem

PROBLEMS = (
    Pad2dProblem(32, 64, 112, 112, (0, 1, 0, 1)),
    Pad2dProblem(8, 64, 256, 256, (1, 1, 1, 1), "reflect"),
)
"""What `escalade ladder pad2d` measures: in front of a strided convolution, and a generator's mirrored images."""

SMALL_PROBLEMS = (
    Pad2dProblem(2, 16, 5, 6, (0, 1, 2, 3)),
    Pad2dProblem(1, 5, 4, 7, (2, -1, -3, 1), value=-1.5),
    Pad2dProblem(2, 8, 4, 5, (3, 1, 2, 4), "reflect"),
    Pad2dProblem(1, 12, 3, 1, (5, 0, 2, 3), "replicate"),
    Pad2dProblem(1, 3, 4, 3, (4, 1, 0, 3), "circular"),
    Pad2dProblem(1, 1, 1, 1, (0, 0, 0, 0)),
    Pad2dProblem(2, 12, 3, 4, (1, 1, 1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
)
"""Small problems that between them have every mode, constants, pixels that are left out, odd channels, and parts of
larger buffers."""
