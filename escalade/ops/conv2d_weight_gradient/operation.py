"""The conv2d_weight_gradient operation and its ladder, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d_weight_gradient import reference
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.conv2d_weight_gradient.rungs.atomics import ATOMICS, SHARED_SUMS
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE
from escalade.ops.conv2d_weight_gradient.rungs.direct import DIRECT
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT, WINDOW_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA, WGMMA_GROUPS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_window import WINDOW
from escalade.ops.shared.images import LAYOUTS


class Conv2dWeightGradient(Operation[Conv2dWeightGradientProblem]):
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

    def preferred(self, problem: Conv2dWeightGradientProblem) -> tuple[str, ...]:
        """Omits `atomics` and `shared_sums`, which are not deterministic."""
        return (
            "depthwise", "wgmma_groups", "window", "few_channels", "wgmma", "window_split", "wgmma_split", "skinny",
            "direct",
        )  # fmt: skip

    def forms(
        self, rung: str, problem: Conv2dWeightGradientProblem
    ) -> tuple[Conv2dWeightGradientProblem, ...]:
        """Tensor cores are worth two layout conversions."""
        if rung in ("atomics", "shared_sums", "direct") or problem.layout == "nhwc":
            return (problem,)
        return (problem, replace(problem, layout="nhwc"))

    def extra_outputs(
        self, problem: Conv2dWeightGradientProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return reference.extra_outputs(problem, device)

    def extra_references(
        self, problem: Conv2dWeightGradientProblem, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return reference.extra_references(problem, inputs)


CONV2D_WEIGHT_GRADIENT = Conv2dWeightGradient()
