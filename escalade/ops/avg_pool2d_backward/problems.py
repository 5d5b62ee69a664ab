"""The problems of avg_pool2d_backward: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.avg_pool2d_backward.problem import AvgPool2dBackwardProblem

PROBLEMS = tuple(
    AvgPool2dBackwardProblem.parse(name)
    for name in ("288_35_k3s1p1_b32", "256_32_k2s2_b256", "2048_7_k7s7_b256")
)
"""What `escalade ladder avg_pool2d_backward` measures: Inception's, whose windows overlap, a halving, and ResNet's mean
over all of an image."""

SMALL_PROBLEMS = tuple(
    AvgPool2dBackwardProblem.parse(name)
    for name in (
        "16_9_k3s1p1_b2",
        "8_10_k2s2_b1",
        "3_11_k3s2p1_b2_ceil_inside",
        "5_6_k2s3p1_b1_ceil",
        "24_7x17_k3x5s2x3p1x2_b1_by7",
        "8_14_k12s4p6_b1",
        "8_7_k7s7_b2",
        "1_1_k1s1_b1",
    )
)
"""Small problems that between them have windows that overlap, touch, leave gaps and are all of the image, both
roundings, every divisor, kernels that are not square, and odd sizes."""
