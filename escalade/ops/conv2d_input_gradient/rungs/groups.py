"""Input gradients of grouped convolutions by conv2d's rungs for groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.conv2d_input_gradient.rungs.duality import AsConvolution


@dataclass(frozen=True)
class GroupedAsConvolution(AsConvolution):
    supports_groups: ClassVar[bool] = True


# Predictions for 144to144_56_k3s1g144 at batch 256 in fp16, 1 GFLOP and 462 MB; the last for 128to128_56_k3s1g32.
RUNGS = (
    GroupedAsConvolution(
        "depthwise",
        "a convolution of dy with the flipped filter by conv2d's depthwise; with a stride, one per sub-pixel phase",
        below="direct",
        # One thread per element of x takes nine 2-byte loads of each tensor for its nine products, 116 M times: 2 G
        # loads at 32 lanes per SM are 0.5 ms. Here 462 MB at 75% of copy bandwidth are 145 us, plus 4 for the filter.
        predicted_gain=3.4,
        convolution="depthwise",
    ),
    GroupedAsConvolution(
        "depthwise_tile",
        "the same by conv2d's depthwise_tile, which reads the gradient once from shared memory",
        below="depthwise",
        # As in conv2d: 135 us instead of 145.
        predicted_gain=1.07,
        convolution="depthwise_tile",
    ),
    GroupedAsConvolution(
        "depthwise_mma",
        "the same by conv2d's depthwise_mma, on tensor cores, for large filters",
        below="depthwise",
        # For 3x3 filters the multiply-adds are hidden behind the copies anyway.
        predicted_gain=1.0,
        convolution="depthwise_mma",
    ),
    GroupedAsConvolution(
        "grouped",
        "the same for groups of several channels, by conv2d's grouped: several groups together on tensor cores",
        below="direct",
        # 7.4 G products of two loads each are 1.8 ms; 205 MB at 60% of copy bandwidth are 85 us.
        predicted_gain=21.0,
        convolution="grouped",
    ),
)
