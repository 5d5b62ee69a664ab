"""The ladder of conv2d_input_gradient, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d.problem import LAYOUTS
from escalade.ops.conv2d_input_gradient import duality, jobs, reference
from escalade.ops.conv2d_input_gradient.direct import DIRECT
from escalade.ops.conv2d_input_gradient.persistent import PERSISTENT
from escalade.ops.conv2d_input_gradient.problem import DTYPES, Conv2dInputGradientProblem

_PARSE = Conv2dInputGradientProblem.parse

PROBLEMS = tuple(
    _PARSE(name)
    for name in (
        # ResNet-18
        "64to64_56_k3s1_b256",
        "64to64_56_k3s1_b256_mask",
        "64to128_56_k3s2_b256",
        "64to128_56_k1s2_b256",
        "128to128_28_k3s1_b256",
        "128to128_28_k3s1_b256_mask",
        "128to256_28_k3s2_b256",
        "256to256_14_k3s1_b256",
        "256to512_14_k3s2_b256",
        "512to512_7_k3s1_b256",
        # ResNet-50
        "64to256_56_k1s1_b256",
        "256to64_56_k1s1_b256_mask",
        "512to128_28_k1s1_b256",
        "256to512_56_k1s2_b256",
        "256to1024_14_k1s1_b256",
        "2048to512_7_k1s1_b256",
        "512to512_14_k3s2_b256",
    )
)

SMALL_PROBLEMS = tuple(
    _PARSE(name)
    for name in (
        "8to16_9_k3s1_b2_mask",
        "3to5_11_k3s1_b1",
        "24to40_12_k1s2_b2",  # three of four classes meet no tap
        "16to8_13_k3s2p0_b1_mask",  # the last row and column are met by nothing
        "5to16_12_k3s2_b1",
        "4to6_10x7_k4x3s3x2p2x0_b2",
        "8to12_10_k3s1g4_b2_mask",
        "8to8_9x11_k3s2x1p2d2x3_b1",  # stride and dilation have a factor in common
        "3to4_5_k1s1p2_b1",  # more padding than the filter reaches over
        "1to1_1_k1s3p1_b1",  # no tap meets the pixel
        "6to3_23_k7s4_b1",
        "64to64_5x6_k3s1_b2_mask",
        "64to128_9x7_k3s2_b1_mask",
        "64to72_6x7_k1s2_b2",
    )
)
"""Small problems that between them have odd sizes, strides with and without remainders, dilation, groups, and padding
beyond the filter."""


def _preference(problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
    if problem.dtype != "fp32":
        return (*HOPPER, "tma_wgmma", "tensor_core", "direct")
    few = problem.forward.filters <= FEW_FILTERS
    return ("implicit_gemm", "direct") if few else (*SPLIT, "implicit_gemm", "direct")


FEW_FILTERS = 8
"""Filters up to which rows of the implicit GEMM, which runs over them, are too short for tensor cores in fp32."""
HOPPER = ("window", "streamed_window", "persistent")
"""Kernels that mask and place results themselves, in fp16 and bf16; of TF32 the second alone."""
SPLIT = ("wgmma_split", "tensor_core_split")
"""The rungs with fp32 accuracy on tensor cores."""
WORTH_CONVERTING = (*HOPPER, "tma_wgmma", "tensor_core")
"""Taken in another layout than the problem's if need be: tensor cores gain more than transpositions cost."""


class Conv2dInputGradient(Operation[Conv2dInputGradientProblem]):
    name = "conv2d_input_gradient"
    ladder = Ladder("conv2d_input_gradient", (DIRECT, *duality.RUNGS, PERSISTENT, *jobs.RUNGS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
        return _preference(problem)

    def forms(self, rung: str, problem: Conv2dInputGradientProblem) -> tuple[Conv2dInputGradientProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        others = (layout for layout in self.layouts if layout != problem.layout)
        return (problem, *(replace(problem, layout=layout) for layout in others))

    def parse(self, name: str) -> Conv2dInputGradientProblem:
        return Conv2dInputGradientProblem.parse(name)

    def inputs(
        self, problem: Conv2dInputGradientProblem, device: torch.device, seed: int
    ) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: Conv2dInputGradientProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(
        self, problem: Conv2dInputGradientProblem, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: Conv2dInputGradientProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


CONV2D_INPUT_GRADIENT = Conv2dInputGradient()
