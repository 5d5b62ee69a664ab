"""Problems to measure, and to test on the twin."""

from __future__ import annotations

from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem

PROBLEMS = (
    SqueezeExciteProblem(1, 32, 112, 112, 8, hidden="silu(x)"),
    SqueezeExciteProblem(1, 1152, 7, 7, 48, hidden="silu(x)"),
    SqueezeExciteProblem(32, 240, 28, 28, 10, hidden="silu(x)"),
    SqueezeExciteProblem(32, 960, 7, 7, 240, gate="hardsigmoid(x)"),
    SqueezeExciteProblem(8, 784, 14, 14, 196),
    SqueezeExciteProblem(8, 256, 56, 56, 16, bias=False, gate_bias=False),
)
"""Gates of EfficientNet-B0 at batch 1 and 32, MobileNetV3, RegNet-Y and SE-ResNet-50."""

SMALL_PROBLEMS = (
    SqueezeExciteProblem(3, 32, 5, 7, 8, hidden="silu(x)"),
    SqueezeExciteProblem(2, 36, 4, 4, 10, gate="hardsigmoid(x)"),
    SqueezeExciteProblem(5, 5, 3, 3, 3, bias=False, gate_bias=False),
    SqueezeExciteProblem(1, 80, 2, 2, 67, bias=False),
    SqueezeExciteProblem(1, 2056, 1, 3, 4, gate_bias=False, hidden="x"),
)
"""Tested on the twin: widths that no vector divides, fewer pixels and channels than CTAs, more channels than threads
times a vector, and uneven batches."""
