"""The problems of layer_norm: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.layer_norm.problem import LayerNormProblem

PROBLEMS = (
    LayerNormProblem(100_352, 96),
    LayerNormProblem(25_088, 192),
    LayerNormProblem(1_568, 768),
    LayerNormProblem(49, 768),
    LayerNormProblem(16_384, 8_192),
    LayerNormProblem(64, 64, inner=4096),
)
"""The norms of a ConvNeXt at batch 32 and 1, rows of a language model's width, and an image's channels in NCHW."""

SMALL_PROBLEMS = (
    LayerNormProblem(37, 96),
    LayerNormProblem(5, 33, bias=False),
    LayerNormProblem(3, 2310, weight=False, bias=False, epsilon=1e-6),
    LayerNormProblem(2, 33_002, rms=True, bias=False),
    LayerNormProblem(70, 8),
    LayerNormProblem(3, 1),
    LayerNormProblem(2, 67, inner=40),
    LayerNormProblem(1, 5, rms=True, inner=9),
)
"""Small problems that between them have rows of a part of a warp, of several warps, and too wide for registers; widths
that no vector divides; and rows that lie side by side."""
