"""The ladder of few_channels, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.few_channels import cuda_core, matrix, reference, tensor_core
from escalade.ops.few_channels.problem import DTYPES, FewChannelsProblem
from escalade.ops.shared.images import LAYOUTS

PROBLEMS = tuple(
    FewChannelsProblem.parse(name)
    for name in (
        "1to4_86_k7_b10000",
        "4to16_40_k7_b10000",
        "1to4_86_k7_b10000_relu_pool2",
        "4to16_40_k7_b10000_relu_pool4c",
    )
)
"""Both convolutions of a LeNet on 10,000 images, without and with what follows them."""

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
"""Small problems that between them have every number of channels by kind, odd sizes, padding, bias, grey values,
windows that hang over."""


class FewChannels(Operation[FewChannelsProblem]):
    name = "few_channels"
    ladder = Ladder("few_channels", (*matrix.RUNGS, *cuda_core.RUNGS, *tensor_core.RUNGS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: FewChannelsProblem) -> tuple[str, ...]:
        return ("pooled", "images_a_tile", "split_halves", "rows", "direct", "matrix_unroll")

    def parse(self, name: str) -> FewChannelsProblem:
        return FewChannelsProblem.parse(name)

    def inputs(self, problem: FewChannelsProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: FewChannelsProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


FEW_CHANNELS = FewChannels()
