"""Problems to measure, and to test on the twin."""

from __future__ import annotations

from escalade.ops.few_channels.problem import FewChannelsProblem

PROBLEMS = tuple(
    FewChannelsProblem.parse(name)
    for name in (
        "1to4_86_k7_b10000",
        "4to16_40_k7_b10000",
        "1to4_86_k7_b10000_relu_pool2",
        "4to16_40_k7_b10000_relu_pool4c",
    )
)
"""Both convolutions of a LeNet at batch 10,000, without and with ReLU and pooling."""

SMALL_PROBLEMS = tuple(
    FewChannelsProblem.parse(name)
    for name in (
        "1to4_18_k7_b3",
        "4to16_13x15_k7_b2_relu_pool4c",
        "1to4_17x22_k7_b2_relu_pool2",
        "3to5_9x14_k5x3p2x1_b3_bias_relu",
        "3to5_11x10_k5x3_b2_uint8_bias_pool3c",
        "2to8_12_k3p1_b1_uint8_relu_pool2",
        "8to32_7x9_k3p1_b2_bias_pool3",
        "1to1_5x40_k1x9p0x4_b1",
        "5to17_6_k2_b2_relu_pool2c",
    )
)
"""Tested on the twin: numbers of channels of every kind, odd sizes, padding, bias, uint8, incomplete windows."""
