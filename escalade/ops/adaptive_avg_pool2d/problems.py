"""The problems of adaptive_avg_pool2d: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem


def _square(channels: int, size: int, output: int, batch: int = 1) -> AdaptiveAvgPool2dProblem:
    return AdaptiveAvgPool2dProblem(batch, channels, size, size, (output, output))


PROBLEMS = tuple(_square(512, 7, 1, batch) for batch in (1, 32, 256))
"""What `escalade ladder adaptive_avg_pool2d` measures: ResNet's, in every dtype and layout that a rung supports."""

SMALL_PROBLEMS = (
    _square(72, 7, 1, batch=2),
    _square(64, 16, 1),
    _square(20, 13, 6, batch=2),
    _square(5, 3, 7),
    AdaptiveAvgPool2dProblem(3, 36, 9, 5, (2, 4)),
    AdaptiveAvgPool2dProblem(1, 3, 17, 11, (1, 3)),
    _square(1, 1, 1),
    AdaptiveAvgPool2dProblem(2, 20, 6, 6, (3, 3), layout="nhwc", x_pitch=32, y_pitch=24),
)
"""Small problems that between them have the whole image, windows that overlap, repeat a pixel and differ in size, and
odd channels, and parts of larger buffers."""
