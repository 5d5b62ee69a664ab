"""The conv2d_weight_gradient operation: its problems, and its ladder, foot to summit."""

from __future__ import annotations

from dataclasses import replace

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d_weight_gradient import reference
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE
from escalade.ops.conv2d_weight_gradient.rungs.depthwise_tile import DEPTHWISE_STAGED, DEPTHWISE_TILE
from escalade.ops.conv2d_weight_gradient.rungs.direct import ATOMICS, DIRECT, SHARED_SUMS
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT, WINDOW_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA, WGMMA_GROUPS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_window import WINDOW
from escalade.ops.conv2d_weight_gradient.rungs.tensor_core import TENSOR_CORE
from escalade.ops.shared.images import LAYOUTS

PROBLEMS = tuple(
    Conv2dWeightGradientProblem.parse(name)
    for name in (
        # ResNet-18 and the 3x3 of ResNet-50
        "3to64_224_k7s2_b256",
        "64to64_56_k3s1_b256",
        "64to128_56_k3s2_b256",
        "64to128_56_k1s2_b256",
        "128to128_28_k3s1_b256",
        "128to256_28_k3s2_b256",
        "256to256_14_k3s1_b256",
        "256to512_14_k3s2_b256",
        "512to512_7_k3s1_b256",
        # ResNet-50's 1x1
        "64to256_56_k1s1_b256",
        "256to64_56_k1s1_b256",
        "512to128_28_k1s1_b256",
        "256to1024_14_k1s1_b256",
        "1024to256_14_k1s1_b256",
        "512to2048_7_k1s1_b256",
        "64to64_56_k3s1_b32",
        "256to256_14_k3s1_b32",
        "64to64_56_k3s1_b256_bias",
        # MobileNetV2
        "32to32_112_k3s1g32_b256",
        "96to96_112_k3s2g96_b256",
        "144to144_56_k3s1g144_b256",
        "384to384_14_k3s1g384_b256",
        "960to960_7_k3s1g960_b256",
        # ResNeXt-50 and RegNetY-400MF
        "128to128_56_k3s1g32_b64",
        "1024to1024_7_k3s1g32_b64",
        "208to208_14_k3s1g26_b64",
        # The convolutional autoencoder
        "3to256_32_k3s1_b256_bias",
        "256to128_16_k3s1_b256_bias",
        "128to128_8_k3s1_b256_bias",
        "128to256_16_k3s1_b256_bias",
        "256to3_32_k3s1_b256_bias",
    )
)

SMALL_PROBLEMS = tuple(
    Conv2dWeightGradientProblem.parse(name)
    for name in (
        "3to5_7x6_k3s1_b2_bias",
        "8to12_9_k3s2p0d2g4_b2",  # groups and dilation
        "8to8_6_k5x2s2x1p3x1_b1_bias",
        "64to64_5x6_k3s1_b2_bias",
        "72to136_4x5_k3s2_b3",  # partial tiles of channels and filters
        "8to24_9_k3s1p0_b18_bias",  # two groups of images, the second nearly empty
        "64to192_7x5_k1s2_b5",
        "40to72_6x9_k2x3s1p1d2_b2_bias",  # several taps in a tile, and dilation
        "3to72_9x19_k7s2p3_b2_bias",  # few channels: pairs of rows per pixel, and partial runs
        "1to8_5x4_k3s1_b2",
        "72to3_5x9_k3s1_b2_bias",  # few filters
        "24to24_9x7_k3s1g24_b3_bias",  # depthwise
        "160to160_5x6_k3s1g40_b2_bias",  # groups of 4, 16 to a tile
        "96to48_6x7_k3s2g4_b3_bias",  # groups of 24 channels and 12 filters, two to a tile
        "64to128_5_k1s1g2_b3",  # one group to a tile
        "120to72_5x4_k3s1g6_b2_bias",  # three groups of 20 channels would fit a tile, but not end at a multiple of 8
        "36to36_8x9_k3x5s2x1p1x2d1x2g36_b2",
        "22to22_7x6_k3s1g22_b2_bias",  # depthwise, 44 bytes per pixel
        "24to24_19x17_k5x3s2x1p1x1g24_b3",  # several tiles, and the last of a row or column not full
        "10to10_7_k5s3p2d2g10_b1_bias",
        "58to30_7_k1s1_b3_bias",  # 116 and 60 bytes per pixel
        "12to34_9x8_k3s2p2x0d1x2_b2",
        "21to19_9x8_k3s1_b3_bias",  # odd numbers of channels and filters
        "15to35_13_k1s1g5_b2",  # odd in each group
        "1to1_1_k1s1_b1",
        "64to72_5x6_k3s1_b2_f3k3s1p1d1_bias",  # volumes
        "24to40_7x5_k1x3s2x1p0x1_b1_f5k2s2p1d2",
    )
)


class Conv2dWeightGradientOperation(Operation[Conv2dWeightGradientProblem]):
    name = "conv2d_weight_gradient"
    problem = Conv2dWeightGradientProblem
    in_pytorch = reference
    ladder = Ladder(
        "conv2d_weight_gradient",
        (
            ATOMICS,
            SHARED_SUMS,
            DIRECT,
            DEPTHWISE,
            DEPTHWISE_STAGED,
            DEPTHWISE_TILE,
            TENSOR_CORE,
            SKINNY,
            FEW_CHANNELS,
            WGMMA,
            WGMMA_GROUPS,
            WINDOW,
            WGMMA_SPLIT,
            WINDOW_SPLIT,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = LAYOUTS
    weights_change = True
    extra_outputs = staticmethod(reference.extra_outputs)
    extra_references = staticmethod(reference.extra_references)

    def preferred(self, problem: Conv2dWeightGradientProblem) -> tuple[str, ...]:
        """Omits `atomics` and `shared_sums`, which are not deterministic."""
        return (
            "depthwise_tile", "depthwise_staged", "depthwise", "wgmma_groups", "window", "few_channels", "wgmma",
            "window_split", "wgmma_split", "skinny", "tensor_core", "direct",
        )  # fmt: skip

    def forms(
        self, rung: str, problem: Conv2dWeightGradientProblem
    ) -> tuple[Conv2dWeightGradientProblem, ...]:
        """Tensor cores are worth two layout conversions."""
        if rung in ("atomics", "shared_sums", "direct") or problem.layout == "nhwc":
            return (problem,)
        return (problem, replace(problem, layout="nhwc"))


CONV2D_WEIGHT_GRADIENT = Conv2dWeightGradientOperation()
