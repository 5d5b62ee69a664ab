"""The ladder of conv2d_weight_gradient, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d_weight_gradient import reference
from escalade.ops.conv2d_weight_gradient.direct import DIRECT
from escalade.ops.conv2d_weight_gradient.few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.hopper import WGMMA, WINDOW
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
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
    )
)

SMALL_PROBLEMS = tuple(
    Conv2dWeightGradientProblem.parse(name)
    for name in (
        "3to5_7x6_k3s1_b2_bias",
        "8to12_9_k3s2p0d2g4_b2",  # groups and dilation
        "8to8_6_k5x2s2x1p3x1_b1_bias",
        "64to64_5x6_k3s1_b2_bias",
        "72to136_4x5_k3s2_b3",  # channels and filters that fill no tile
        "8to24_9_k3s1p0_b18_bias",  # two groups of images, the second nearly empty
        "64to192_7x5_k1s2_b5",
        "40to72_6x9_k2x3s1p1d2_b2_bias",  # several taps in a tile, and dilation
        "3to72_9x19_k7s2p3_b2_bias",  # few channels: pairs of rows in a pixel, and runs that are not full
        "1to8_5x4_k3s1_b2",
        "1to1_1_k1s1_b1",
    )
)


class Conv2dWeightGradient(Operation[Conv2dWeightGradientProblem]):
    name = "conv2d_weight_gradient"
    ladder = Ladder("conv2d_weight_gradient", (DIRECT, FEW_CHANNELS, WGMMA, WINDOW))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: Conv2dWeightGradientProblem) -> tuple[str, ...]:
        return ("window", "few_channels", "wgmma", "direct")

    def forms(
        self, rung: str, problem: Conv2dWeightGradientProblem
    ) -> tuple[Conv2dWeightGradientProblem, ...]:
        """Tensor cores gain more than two transpositions cost."""
        if rung == "direct" or problem.layout == "nhwc":
            return (problem,)
        return (problem, replace(problem, layout="nhwc"))

    def parse(self, name: str) -> Conv2dWeightGradientProblem:
        return Conv2dWeightGradientProblem.parse(name)

    def inputs(
        self, problem: Conv2dWeightGradientProblem, device: torch.device, seed: int
    ) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: Conv2dWeightGradientProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def further_outputs(
        self, problem: Conv2dWeightGradientProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return reference.further_outputs(problem, device)

    def further_references(
        self, problem: Conv2dWeightGradientProblem, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return reference.further_references(problem, inputs)

    def reference(
        self, problem: Conv2dWeightGradientProblem, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: Conv2dWeightGradientProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


CONV2D_WEIGHT_GRADIENT = Conv2dWeightGradient()
