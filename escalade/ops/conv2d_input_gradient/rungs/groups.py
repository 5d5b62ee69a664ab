"""The gradient of convolutions in groups, by conv2d's own rungs for them: each group of its channels sees one of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.conv2d_input_gradient.rungs.duality import AsConvolution


@dataclass(frozen=True)
class InGroups(AsConvolution):
    takes_groups: ClassVar[bool] = True


# Predictions for 144to144_56_k3s1g144 at batch 256 in fp16, 1 GFLOP and 462 MB; the last for 128to128_56_k3s1g32.
RUNGS = (
    InGroups(
        "depthwise",
        "a convolution of the gradient with a filter for every channel, turned around, by conv2d's depthwise; with a "
        "stride, one for each class of pixels that meet the same taps",
        below="direct",
        # A thread an element of x takes nine loads of 2 bytes of each tensor for its nine products, 116 M of them:
        # 2 G loads at 32 lanes of each multiprocessor are 0.5 ms. Here 462 MB at 75% of a copy's rate are 145 us, 4 for
        # the filter.
        predicted_gain=3.4,
        convolution="depthwise",
    ),
    InGroups(
        "depthwise_tile",
        "the same by conv2d's depthwise_tile, which reads the gradient once from shared memory",
        below="depthwise",
        # As in conv2d: 135 us instead of 145.
        predicted_gain=1.07,
        convolution="depthwise_tile",
    ),
    InGroups(
        "depthwise_mma",
        "the same by conv2d's depthwise_mma, on tensor cores, for large filters",
        below="depthwise",
        # Of 3x3 filters the multiply-adds are hidden behind the copies anyway.
        predicted_gain=1.0,
        convolution="depthwise_mma",
    ),
    InGroups(
        "grouped",
        "the same for groups of several channels, by conv2d's grouped: several groups together on tensor cores",
        below="direct",
        # 7.4 G products, two loads each, are 1.8 ms; 205 MB at 60% of a copy's rate are 85 us.
        predicted_gain=21.0,
        convolution="grouped",
    ),
)
