"""The conv2d operation: its ladder, foot to summit, and the preferred order of rungs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.conv2d import reference
from escalade.ops.conv2d.problem import DTYPES, Conv2dProblem
from escalade.ops.conv2d.problems import CROSSOVER, PROBLEMS, SMALL_PROBLEMS
from escalade.ops.conv2d.rungs import (
    col2im,
    depthwise,
    depthwise_mma,
    depthwise_tile,
    direct,
    fft,
    fused_epilogue,
    gemm,
    grouped,
    implicit_gemm,
    ragged,
    resident,
    skinny,
    sm90_narrow,
    sm90_persistent,
    sm90_planes,
    sm90_split,
    sm90_streamed_window,
    sm90_wgmma,
    sm90_window,
    stem,
    tensor_core,
    winograd,
)
from escalade.ops.conv2d.rungs.skinny import FILTERS as SKINNY_FILTERS
from escalade.ops.shared.images import LAYOUTS

HOPPER = (
    "stem",
    "planes",
    "narrow",
    "window",
    "streamed_window",
    "overlapped_store",
    "swapped_operands",
    "cluster_split_k",
)
"""Rungs that need TMA and wgmma; the tuner finds out which is fastest."""
PREFERENCE = {
    "fp32": ("implicit_gemm", "tuned", "direct"),
    "tf32": ("resident", "skinny", "col2im", *HOPPER, "ragged", "fused_epilogue", "tuned", "direct"),
    "fp16": ("resident", "skinny", "col2im", *HOPPER, "ragged", "fused_epilogue", "tuned", "direct"),
    "bf16": ("resident", "skinny", "col2im", *HOPPER, "ragged", "fused_epilogue", "tuned", "direct"),
    "fp8": ("persistent", "cluster_split_k", "fused_epilogue"),
    "int8": ("window", "persistent", "cluster_split_k"),
}
"""Rungs by dtype, from the fastest known to the one that supports everything."""
FP32_NHWC = (
    "wgmma_split",
    "skinny",
    "col2im",
    "ragged",
    "tensor_core_split",
    "winograd_f4_split",
    "winograd_f4_pipelined",
    "implicit_gemm",
    "tuned",
    "direct",
)
"""Rungs for fp32 in NHWC: tensor cores on split operands, and Winograd on top of them."""
WINOGRAD_PIXELS = 25_000
"""Output pixels from which Winograd's fewer products pay for its three launches. A guess: 64to64_56_k3s1 was slower
with it at batch 1 and faster at batch 32."""
FEW_CHANNELS = 8
"""Up to this many channels, rows of the implicit GEMM are too short for tensor cores in fp32."""
SHORTCUT = (*HOPPER, "persistent", "wgmma_split", "fused_epilogue")
"""Rungs whose kernel continues with the shortcut image."""
GROUPED = ("depthwise_mma", "depthwise_tile", "depthwise", "grouped")
"""Rungs for grouped channels, which no other tensor-core rung supports."""
LARGE_FILTER = ("fft_fused", "fft")
"""Preferred to all others from `LARGE_FILTER_TAPS` taps on."""
LARGE_FILTER_TAPS = {"fp32": 49, "tf32": 121, "fp16": 121, "bf16": 121}
"""Taps from which a filter is large: the measured crossover in fp32 (docs/ladder.md), with a margin for few channels;
an estimate on tensor cores."""
WORTH_CONVERTING = (
    *HOPPER,
    "persistent",
    "resident",
    "skinny",
    "col2im",
    "ragged",
    "fused_epilogue",
    "grouped",
)
"""Worth two layout conversions if the problem has the other layout."""


def _preference(problem: Conv2dProblem) -> tuple[str, ...]:
    if problem.dtype != "fp32" or problem.layout != "nhwc":
        return PREFERENCE[problem.dtype]
    if problem.channels <= FEW_CHANNELS:
        return tuple(reversed(FP32_NHWC[:-1])) + FP32_NHWC[-1:]
    winograd = tuple(name for name in FP32_NHWC if name.startswith("winograd"))
    return (winograd if problem.output_pixels >= WINOGRAD_PIXELS else ()) + FP32_NHWC


@lru_cache(1024)
def _in_all_layouts(problem: Conv2dProblem) -> tuple[Conv2dProblem, ...]:
    others = (layout for layout in LAYOUTS if layout != problem.layout)
    return (problem, *(replace(problem, layout=layout) for layout in others))


class Conv2d(Operation[Conv2dProblem]):
    name = "conv2d"
    problem = Conv2dProblem
    in_pytorch = reference
    ladder = Ladder(
        "conv2d",
        (
            *direct.RUNGS,
            *gemm.RUNGS,
            *implicit_gemm.RUNGS,
            *tensor_core.RUNGS,
            *fused_epilogue.RUNGS,
            *ragged.RUNGS,
            *col2im.RUNGS,
            *resident.RUNGS,
            *skinny.RUNGS,
            *sm90_wgmma.RUNGS,
            *sm90_persistent.RUNGS,
            *sm90_window.RUNGS,
            *sm90_streamed_window.RUNGS,
            *sm90_narrow.RUNGS,
            *sm90_planes.RUNGS,
            *sm90_split.RUNGS,
            *stem.RUNGS,
            *winograd.RUNGS,
            *fft.RUNGS,
            *depthwise.RUNGS,
            *depthwise_tile.RUNGS,
            *depthwise_mma.RUNGS,
            *grouped.RUNGS,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    crossover = CROSSOVER
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Conv2dProblem) -> tuple[str, ...]:
        if problem.shortcut_channels:
            return SHORTCUT
        large = problem.taps >= LARGE_FILTER_TAPS.get(problem.dtype, problem.taps + 1)
        by_group = GROUPED if problem.groups > 1 else ()
        rungs = by_group + (LARGE_FILTER if large else ()) + _preference(problem)
        # Without a row of taps, narrow has nothing to share and col2im nothing to gather: on 144to24_56 resident took
        # 8.4 us, narrow 12.2.
        idle = {"narrow", "col2im"} if problem.taps == 1 else set()
        # skinny has 64 filters per warp and computes the products of missing ones too.
        idle |= {"skinny"} if problem.filters % SKINNY_FILTERS and not problem.pools else set()
        return tuple(name for name in rungs if name not in idle)

    def extra_outputs(self, problem: Conv2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return reference.extra_outputs(problem, device)

    def extra_references(self, problem: Conv2dProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return reference.extra_references(problem, inputs)

    def tuned_as(self, problem: Conv2dProblem) -> Conv2dProblem:
        return replace(problem, epsilon=None, momentum=None) if problem.statistics else problem

    def roundings(self, problem: Conv2dProblem) -> int:
        return super().roundings(problem) + bool(problem.prologue)

    def forms(self, rung: str, problem: Conv2dProblem) -> tuple[Conv2dProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        return _in_all_layouts(problem)


CONV2D = Conv2d()
