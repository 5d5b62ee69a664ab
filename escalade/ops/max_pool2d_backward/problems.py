"""The problems of max_pool2d_backward: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem

PROBLEMS = tuple(
    MaxPool2dBackwardProblem.parse(name)
    for name in (
        "64_112_k3s2p1_b256",
        "64_112_k3s2p1_b256_stored",
        "256_32_k2s2_b256_mask",
        "256_32_k2s2_b256_stored",
    )
)
"""What `escalade ladder max_pool2d_backward` measures: ResNet's, whose windows overlap, and an autoencoder's, behind a
ReLU."""

SMALL_PROBLEMS = tuple(
    MaxPool2dBackwardProblem.parse(name)
    for name in (
        "16_13_k3s2p1_b2",
        "16_13_k3s2p1_b2_stored",
        "8_10_k2s2_b1_mask",
        "8_10_k2s2_b2_stored",
        "3_9x16_k2s2_b2",
        "2_7x8_k2x1s3x2_b1_stored",
        "12_9_k3s1p1_b1_mask",
        "3_11_k3s2_b2_ceil",
        "5_6_k2s3p1_b1_ceil_stored",
        "24_7x17_k3x5s2x3p1x2_b1",
        "6_9x8_k3x2s2x1p1d2x3_b1_mask",
        "6_9x8_k3x2s2x1p1d2x3_b1_stored",
        "8_20_k16s4p8_b1",
        "1_1_k1s1_b1",
    )
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, kernels that are
not square or have more pixels than a byte counts, gaps inside of windows, and x or stored places."""
