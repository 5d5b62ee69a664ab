"""Problems to measure, to test on the twin, and to find the crossover to FFT."""

from __future__ import annotations

from escalade.ops.conv2d.problem import Conv2dProblem

_SQUARE = Conv2dProblem.square

PROBLEMS = (
    _SQUARE(64, 64, 56, 3, batch=1),
    _SQUARE(64, 64, 56, 3, batch=32),
    _SQUARE(64, 64, 56, 3, batch=256),
    _SQUARE(64, 64, 56, 3, batch=256, bias=True, residual=True, relu=True),
    _SQUARE(128, 128, 28, 3, batch=256),
    _SQUARE(128, 128, 28, 3, batch=256, bias=True, residual=True, relu=True),
    _SQUARE(256, 256, 14, 3, batch=256),
    _SQUARE(3, 64, 224, 7, batch=256, stride=2),
    _SQUARE(64, 128, 56, 3, batch=256, stride=2),
    _SQUARE(64, 128, 56, 1, batch=256, stride=2),
    _SQUARE(1, 4, 86, 7, batch=10_000, padding=0),
    _SQUARE(4, 16, 40, 7, batch=10_000, padding=0),
    _SQUARE(32, 32, 64, 31, batch=32),
    _SQUARE(256, 256, 56, 31, batch=32, groups=256),
    _SQUARE(144, 144, 56, 3, batch=256, groups=144),
    _SQUARE(96, 96, 112, 3, batch=256, stride=2, groups=96),
    _SQUARE(672, 672, 14, 5, batch=256, groups=672),
    _SQUARE(96, 96, 56, 7, batch=64, groups=96),
    _SQUARE(128, 128, 56, 3, batch=256, groups=32),
    _SQUARE(256, 256, 56, 3, batch=256, stride=2, groups=32),
    _SQUARE(1024, 1024, 14, 3, batch=256, groups=32),
    _SQUARE(3, 256, 32, 3, batch=256, bias=True, relu=True),
    _SQUARE(3, 256, 32, 3, batch=256, layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(256, 128, 16, 3, batch=256, dtype="fp16", layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(256, 3, 32, 3, batch=256, bias=True),
)  # fmt: skip
"""Measured by `escalade ladder conv2d` in every dtype and layout that a rung supports."""

CROSSOVER = tuple(_SQUARE(32, 32, 64, size, batch=32) for size in (3, 5, 7, 9, 11, 15, 21, 31))
"""Growing filters on one image size: where FFT overtakes the direct algorithms."""

SMALL_PROBLEMS = (
    _SQUARE(8, 16, 9, 3, batch=2),
    _SQUARE(3, 5, 11, 3, batch=1, bias=True),
    _SQUARE(16, 24, 7, 3, batch=3, bias=True, residual=True, relu=True),
    _SQUARE(64, 72, 8, 3, batch=1, relu=True),
    _SQUARE(32, 64, 9, 3, batch=1, bias=True),
    _SQUARE(16, 64, 5, 3, batch=2, relu=True),
    _SQUARE(24, 40, 12, 1, batch=2, stride=2),
    _SQUARE(16, 8, 13, 3, batch=1, stride=2, padding=0, residual=True),
    _SQUARE(3, 16, 23, 7, batch=1, stride=2, bias=True, relu=True),
    _SQUARE(3, 64, 19, 7, batch=1, stride=2, bias=True, relu=True),
    _SQUARE(1, 4, 19, 7, batch=2, padding=0),
    _SQUARE(4, 16, 14, 7, batch=1, padding=0),
    _SQUARE(2, 3, 20, 15, batch=1),
    _SQUARE(8, 8, 10, 5, batch=1, groups=8, bias=True),
    _SQUARE(8, 12, 10, 3, batch=2, groups=4),
    _SQUARE(32, 32, 9, 3, batch=2, groups=8, bias=True, residual=True, relu=True),
    Conv2dProblem(2, 8, 9, 14, 12, 1, 7, padding=(0, 3)),
    Conv2dProblem(1, 8, 12, 10, 20, 5, 3, (2, 1), (2, 0), (1, 2), bias=True, relu=True),
    Conv2dProblem(1, 16, 11, 13, 8, 3, 3, padding=(2, 2), dilation=(2, 2)),
    Conv2dProblem(1, 5, 1, 1, 7, 1, 1),
    Conv2dProblem(2, 64, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True),
    Conv2dProblem(3, 64, 9, 7, 128, 1, 3, (2, 2), (0, 1), residual=True),
    _SQUARE(64, 40, 6, 3, batch=1, dtype="fp16", layout="nhwc", bias=True, relu=True,
            shortcut_channels=64, shortcut_stride=2),
    _SQUARE(64, 64, 6, 3, batch=2, dtype="fp16", layout="nhwc", bias=True, relu=True,
            shortcut_channels=72, shortcut_stride=2),
    _SQUARE(8, 24, 7, 3, batch=3, dtype="fp16", layout="nhwc", residual=True,
            shortcut_channels=40, shortcut_stride=2, shortcut_size=(13, 14)),
    _SQUARE(32, 48, 5, 3, batch=2, dtype="fp8", layout="nhwc", bias=True, residual=True, relu=True, output="fp16"),
    _SQUARE(16, 32, 7, 3, batch=1, dtype="fp8", layout="nhwc", stride=2),
    _SQUARE(32, 64, 5, 3, batch=2, dtype="int8", layout="nhwc", bias=True, residual=True, relu=True),
    _SQUARE(160, 48, 6, 3, batch=1, dtype="int8", layout="nhwc", stride=2, bias=True, output="fp16"),
    _SQUARE(48, 80, 4, 3, batch=1, dtype="fp8", layout="nhwc", residual=True, relu=True,
            shortcut_channels=80, shortcut_stride=2, output="fp16"),
    _SQUARE(64, 64, 6, 3, batch=2, dtype="fp16", layout="nhwc", bias=True, relu=True, x_pitch=96, y_pitch=144),
    _SQUARE(24, 40, 7, 3, batch=2, stride=2, dtype="fp16", layout="nhwc", x_pitch=48, y_pitch=64),
    _SQUARE(64, 64, 5, 1, dtype="fp16", layout="nhwc", residual=True, y_pitch=80),
    _SQUARE(16, 24, 5, 3, layout="nhwc", bias=True, y_pitch=32),
    _SQUARE(40, 24, 6, 1, batch=2, dtype="fp16", layout="nhwc", bias=True, residual=True,
            prologue="gate * silu(x)"),
    _SQUARE(64, 32, 7, 1, batch=2, stride=2, dtype="fp16", layout="nhwc", bias=True, relu=True,
            prologue="relu(gain * x + shift)"),
    _SQUARE(3, 72, 9, 3, batch=2, layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(64, 72, 4, 3, dtype="fp16", layout="nhwc", residual=True, pool=(2, 1)),
    _SQUARE(24, 72, 21, 3, batch=3, dtype="fp16", layout="nhwc", epsilon=1e-5, momentum=0.1),
    _SQUARE(64, 136, 9, 1, batch=3, dtype="bf16", layout="nhwc", bias=True, relu=True, epsilon=1e-3),
    _SQUARE(16, 64, 12, 3, batch=2, dtype="tf32", layout="nhwc", stride=2, epsilon=1e-5, momentum=0.25),
)  # fmt: skip
"""Tested on the twin: odd sizes, every epilogue, stride, dilation, groups, non-square filters, shortcuts, FP8, pitches,
prologues, pools and statistics."""
