"""The conv2d_input_gradient operation: its ladder, foot to summit, and the preferred order of rungs."""

from __future__ import annotations

from dataclasses import replace

import torch

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d_input_gradient import reference
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.conv2d_input_gradient.rungs import duality, groups, sm90_wgmma
from escalade.ops.conv2d_input_gradient.rungs.atomics import ATOMICS
from escalade.ops.conv2d_input_gradient.rungs.col2im import COL2IM
from escalade.ops.conv2d_input_gradient.rungs.direct import DIRECT
from escalade.ops.conv2d_input_gradient.rungs.planes import PLANES
from escalade.ops.conv2d_input_gradient.rungs.shared_tile import SHARED_TILE
from escalade.ops.conv2d_input_gradient.rungs.skinny import SKINNY
from escalade.ops.conv2d_input_gradient.rungs.sm90_persistent import ONE_LAUNCH, PERSISTENT
from escalade.ops.conv2d_input_gradient.rungs.subpixel import SUBPIXEL
from escalade.ops.shared.images import LAYOUTS


def _preference(problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
    if problem.forward.groups > 1:
        return (*GROUPED, "direct")
    if problem.dtype != "fp32":
        return ("planes", "skinny", "col2im", *HOPPER, "subpixel", "tma_wgmma", "tensor_core", "direct")
    few = problem.forward.filters <= FEW_FILTERS
    return ("skinny", "col2im", *(() if few else SPLIT), "subpixel", "implicit_gemm", "direct")


GROUPED = tuple(rung.name for rung in groups.RUNGS)
FEW_FILTERS = 8
"""Up to this many filters, rows of the implicit GEMM are too short for tensor cores in fp32."""
HOPPER = ("window", "streamed_window", "persistent", "one_launch")
"""Kernels that apply the mask and scatter results themselves, in fp16 and bf16; the second and last in TF32 too."""
SPLIT = ("wgmma_split", "tensor_core_split")
WORTH_CONVERTING = (*GROUPED, *HOPPER, "skinny", "col2im", "subpixel", "tma_wgmma", "tensor_core")
"""Worth two layout conversions if the problem has the other layout."""


class Conv2dInputGradient(Operation[Conv2dInputGradientProblem]):
    name = "conv2d_input_gradient"
    problem = Conv2dInputGradientProblem
    in_pytorch = reference
    ladder = Ladder(
        "conv2d_input_gradient",
        (
            ATOMICS,
            DIRECT,
            SHARED_TILE,
            *duality.RUNGS,
            *groups.RUNGS,
            SKINNY,
            COL2IM,
            SUBPIXEL,
            PLANES,
            PERSISTENT,
            ONE_LAUNCH,
            *sm90_wgmma.RUNGS,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
        """Omits `atomics`, which is not deterministic."""
        return ("persistent",) if problem.norm else _preference(problem)

    def tuned_as(self, problem: Conv2dInputGradientProblem) -> Conv2dInputGradientProblem:
        return replace(problem, norm="")

    def extra_outputs(
        self, problem: Conv2dInputGradientProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return reference.extra_outputs(problem, device)

    def extra_references(
        self, problem: Conv2dInputGradientProblem, inputs: reference.Tensors
    ) -> dict[str, torch.Tensor]:
        return reference.extra_references(problem, inputs)

    def forms(self, rung: str, problem: Conv2dInputGradientProblem) -> tuple[Conv2dInputGradientProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        others = (layout for layout in self.layouts if layout != problem.layout)
        return (problem, *(replace(problem, layout=layout) for layout in others))


CONV2D_INPUT_GRADIENT = Conv2dInputGradient()
