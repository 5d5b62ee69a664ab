"""The problems of convert: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.convert.problem import ConvertProblem

PROBLEMS = (
    ConvertProblem(1, 3, 224, 224, padded_channels=4),
    ConvertProblem(32, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, "uint8", padded_channels=4, normalise=True),
    ConvertProblem(32, 64, 56, 56, "fp16", "nhwc"),
    ConvertProblem(32, 64, 56, 56, "fp16", "nhwc", "fp16", stored_channels=128, ways=2, step=64),
)
"""What `escalade ladder convert` measures, in every dtype and layout that a rung supports."""

SMALL_PROBLEMS = (
    ConvertProblem(2, 3, 8, 6, padded_channels=4),
    ConvertProblem(2, 3, 5, 7, "uint8", padded_channels=8, normalise=True),
    ConvertProblem(1, 1, 9, 16, "fp16", padded_channels=4, normalise=True),
    ConvertProblem(3, 4, 4, 12, "bf16"),
    ConvertProblem(2, 3, 5, 8, "fp32", "nhwc", padded_channels=4),
    ConvertProblem(2, 3, 6, 7, "fp16", "nhwc", stored_channels=8),
    ConvertProblem(2, 3, 7, 7, "uint8", "nhwc", normalise=True),
    ConvertProblem(2, 70, 5, 13, "fp16", "nhwc", stored_channels=72, normalise=True),
    ConvertProblem(1, 40, 8, 16, "fp32", "nhwc"),
    ConvertProblem(1, 24, 7, 12, "bf16", padded_channels=32),
    ConvertProblem(2, 67, 9, 8, "uint8", normalise=True),
    ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=40, y_pitch=56),
    ConvertProblem(3, 10, 3, 3, "bf16", "nhwc", "bf16", stored_channels=16, y_pitch=16),
    ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=48, ways=2, step=24, y_pitch=56),
    ConvertProblem(2, 30, 3, 5, "fp32", "nhwc", "fp32", ways=3, step=10),
    ConvertProblem(1, 7, 3, 3, "bf16", "nhwc", "bf16", stored_channels=11, ways=4, step=3),
)
"""Small problems that between them have every source and pair of layouts, channels left out and added, odd sizes on
both sides, channels dealt out of several ways, and parts of larger buffers."""
