"""The problems of max_pool2d: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.max_pool2d.problem import MaxPool2dProblem


def _square(
    channels: int, size: int, kernel: int, stride: int, padding: int, batch: int = 1, ceil: bool = False
) -> MaxPool2dProblem:
    return MaxPool2dProblem(
        batch, channels, size, size, (kernel, kernel), (stride, stride), (padding, padding), ceil
    )


PROBLEMS = (
    *(_square(64, 112, 3, 2, 1, batch) for batch in (1, 32, 256)),
    MaxPool2dProblem.parse("256_32_k2s2_b256_behindrelu"),
)
"""What `escalade ladder max_pool2d` measures: ResNet's, in every dtype and layout that a rung supports, and that of an
autoencoder in training."""

SMALL_PROBLEMS = (
    _square(16, 16, 3, 2, 1, batch=2),
    _square(8, 10, 2, 2, 0),
    _square(12, 9, 3, 1, 1),
    _square(3, 11, 3, 2, 0, batch=2, ceil=True),
    _square(5, 6, 2, 3, 1, ceil=True),
    MaxPool2dProblem(1, 24, 7, 37, (3, 5), (2, 3), (1, 2)),
    MaxPool2dProblem(2, 8, 2, 5, (3, 1), (2, 1), ceil_mode=True),
    _square(8, 14, 12, 4, 6),
    _square(1, 1, 1, 1, 0),
    MaxPool2dProblem(2, 12, 7, 5, (3, 3), (2, 2), (1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
    MaxPool2dProblem(1, 6, 9, 8, (3, 2), (2, 1), (1, 1), dilation=(2, 3)),
    MaxPool2dProblem(1, 16, 9, 7, (3, 3), (2, 2), (1, 1), places=True),
    MaxPool2dProblem(1, 6, 9, 8, (3, 2), (2, 1), (1, 1), dilation=(2, 3), places=True, behind_relu=True),
    MaxPool2dProblem(2, 8, 6, 6, (2, 2), (2, 2), places=True, behind_relu=True),
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, kernels that are
not square, odd sizes, parts of larger buffers, windows with gaps, and places of maxima, behind a ReLU too."""
