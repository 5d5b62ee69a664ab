"""The problems of group_norm: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.group_norm.problem import GroupNormProblem

PROBLEMS = (
    GroupNormProblem(32, 64, 112, 112, 32, relu=True),
    GroupNormProblem(32, 256, 56, 56, 32),
    GroupNormProblem(32, 512, 7, 7, 32, relu=True),
    GroupNormProblem(1, 320, 64, 64, 32, activation="silu(x)"),
    GroupNormProblem(8, 64, 256, 256, 64),
    GroupNormProblem(32, 64, 56, 56, 1),
)
"""The norms of a ResNet with groups, of a diffusion model's U-Net, of style transfer (one channel a group), and of a
network with one group."""

SMALL_PROBLEMS = (
    GroupNormProblem(2, 32, 5, 7, 4),
    GroupNormProblem(2, 16, 3, 3, 16, relu=True),
    GroupNormProblem(1, 24, 5, 4, 8, bias=False),
    GroupNormProblem(2, 36, 4, 4, 1, weight=False, bias=False, epsilon=1e-3),
    GroupNormProblem(3, 5, 1, 1, 1),
    GroupNormProblem(1, 16, 40, 40, 2),
)
"""Small problems that between them have groups wider and narrower than a pack, and of which neither divides the other;
and more than one split."""
