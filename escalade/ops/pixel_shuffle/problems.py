"""The problems of pixel_shuffle: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem

PROBLEMS = (
    PixelShuffleProblem(8, 256, 128, 128, 2),
    PixelShuffleProblem(8, 12, 256, 256, 2),
    PixelShuffleProblem(8, 64, 256, 256, 2, down=True),
)
"""What `escalade ladder pixel_shuffle` measures: an upscaler's features, its image in three colours, and a detector's
first layer."""

SMALL_PROBLEMS = (
    PixelShuffleProblem(2, 32, 3, 4, 2),
    PixelShuffleProblem(1, 12, 5, 3, 2),
    PixelShuffleProblem(1, 36, 2, 3, 3),
    PixelShuffleProblem(2, 16, 4, 6, 2, down=True),
    PixelShuffleProblem(1, 3, 6, 3, 3, down=True),
    PixelShuffleProblem(1, 400, 1, 2, 20),
    PixelShuffleProblem(1, 5, 2, 2, 1),
    PixelShuffleProblem(1, 48, 2, 3, 2, layout="nhwc", x_pitch=64, y_pitch=24),
)
"""Small problems that between them have both ways, odd factors and channels, a factor too large for a thread's
registers, and parts of larger buffers."""
