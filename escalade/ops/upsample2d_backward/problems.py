"""The problems of upsample2d_backward: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

PROBLEMS = tuple(
    Upsample2dBackwardProblem.parse(name)
    for name in ("256_16to32_b256_nearest", "64_56to112_b32_bilinear", "64_56to112_b32_bicubic")
)
"""What `escalade ladder upsample2d_backward` measures: an autoencoder's doubling, and a decoder's smooth ones."""

SMALL_PROBLEMS = tuple(
    Upsample2dBackwardProblem.parse(name)
    for name in (
        "16_5x7to10x14_b2_nearest",
        "8_5x3to10x12_b1_nearest_exact",
        "16_5x7to10x14_b2_bilinear",
        "12_7x5to3x11_b1_bilinear_corners",
        "8_5to6x13_b1_bilinear_by1.3x2.7",
        "3_4x6to9x1_b1_bicubic_corners",
        "8_1to3x5_b2_bicubic",
        "8_5x7to10x14_b1_bicubic",
        "5_7x6to16_b1_nearest_by2.3x2.7",
        "5_9x10to4x7_b2_nearest_exact",
        "8_3to33_b1_nearest",
        "8_3to30_b1_bilinear",
    )
)
"""Small problems that between them have every mode, both rules for corners, factors of their own, gradients that are
larger, smaller, of one pixel and many times as large, and odd channels."""
