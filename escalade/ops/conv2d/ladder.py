"""The ladder of conv2d: the families of rungs, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d import (
    depthwise,
    direct,
    fft,
    gemm,
    grouped,
    hopper,
    hopper_persistent,
    hopper_split,
    hopper_streamed_window,
    hopper_window,
    reference,
    stem,
    tensor_core,
    winograd,
)
from escalade.ops.conv2d.problem import Conv2dProblem

_SQUARE = Conv2dProblem.square

PROBLEMS = (
    _SQUARE(64, 64, 56, 3, batch=1),
    _SQUARE(64, 64, 56, 3, batch=32),
    _SQUARE(64, 64, 56, 3, batch=256),
    _SQUARE(64, 64, 56, 3, batch=256, bias=True, residual=True, relu=True),
    _SQUARE(128, 128, 28, 3, batch=256),
    _SQUARE(128, 128, 28, 3, batch=256, bias=True, residual=True, relu=True),
    _SQUARE(256, 256, 14, 3, batch=256),
    _SQUARE(3, 64, 224, 7, batch=256, stride=2),
    _SQUARE(64, 128, 56, 3, batch=256, stride=2),
    _SQUARE(64, 128, 56, 1, batch=256, stride=2),
    _SQUARE(1, 4, 86, 7, batch=10_000, padding=0),
    _SQUARE(4, 16, 40, 7, batch=10_000, padding=0),
    _SQUARE(32, 32, 64, 31, batch=32),
    _SQUARE(256, 256, 56, 31, batch=32, groups=256),
    _SQUARE(144, 144, 56, 3, batch=256, groups=144),
    _SQUARE(96, 96, 112, 3, batch=256, stride=2, groups=96),
    _SQUARE(672, 672, 14, 5, batch=256, groups=672),
    _SQUARE(96, 96, 56, 7, batch=64, groups=96),
    _SQUARE(128, 128, 56, 3, batch=256, groups=32),
    _SQUARE(256, 256, 56, 3, batch=256, stride=2, groups=32),
    _SQUARE(1024, 1024, 14, 3, batch=256, groups=32),
)
"""What `escalade ladder conv2d` measures, in every dtype and layout that a rung supports."""

CROSSOVER = tuple(_SQUARE(32, 32, 64, size, batch=32) for size in (3, 5, 7, 9, 11, 15, 21, 31))
"""One image size, growing filters: where FFT overtakes the direct algorithms."""

SMALL_PROBLEMS = (
    _SQUARE(8, 16, 9, 3, batch=2),
    _SQUARE(3, 5, 11, 3, batch=1, bias=True),
    _SQUARE(16, 24, 7, 3, batch=3, bias=True, residual=True, relu=True),
    _SQUARE(64, 72, 8, 3, batch=1, relu=True),
    _SQUARE(24, 40, 12, 1, batch=2, stride=2),
    _SQUARE(16, 8, 13, 3, batch=1, stride=2, padding=0, residual=True),
    _SQUARE(3, 16, 23, 7, batch=1, stride=2, bias=True, relu=True),
    _SQUARE(3, 64, 19, 7, batch=1, stride=2, bias=True, relu=True),
    _SQUARE(1, 4, 19, 7, batch=2, padding=0),
    _SQUARE(4, 16, 14, 7, batch=1, padding=0),
    _SQUARE(2, 3, 20, 15, batch=1),
    _SQUARE(8, 8, 10, 5, batch=1, groups=8, bias=True),
    _SQUARE(8, 12, 10, 3, batch=2, groups=4),
    _SQUARE(32, 32, 9, 3, batch=2, groups=8, bias=True, residual=True, relu=True),
    Conv2dProblem(2, 8, 9, 14, 12, 1, 7, padding=(0, 3)),
    Conv2dProblem(1, 8, 12, 10, 20, 5, 3, (2, 1), (2, 0), (1, 2), bias=True, relu=True),
    Conv2dProblem(1, 16, 11, 13, 8, 3, 3, padding=(2, 2), dilation=(2, 2)),
    Conv2dProblem(1, 5, 1, 1, 7, 1, 1),
    Conv2dProblem(2, 64, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True),
    Conv2dProblem(3, 64, 9, 7, 128, 1, 3, (2, 2), (0, 1), residual=True),
    _SQUARE(64, 40, 6, 3, batch=1, dtype="fp16", layout="nhwc", bias=True, relu=True,
            shortcut_channels=64, shortcut_stride=2),
    _SQUARE(64, 64, 6, 3, batch=2, dtype="fp16", layout="nhwc", bias=True, relu=True,
            shortcut_channels=72, shortcut_stride=2),
    _SQUARE(8, 24, 7, 3, batch=3, dtype="fp16", layout="nhwc", residual=True,
            shortcut_channels=40, shortcut_stride=2, shortcut_size=(13, 14)),
    _SQUARE(32, 48, 5, 3, batch=2, dtype="fp8", layout="nhwc", bias=True, residual=True, relu=True, output="fp16"),
    _SQUARE(16, 32, 7, 3, batch=1, dtype="fp8", layout="nhwc", stride=2),
    _SQUARE(48, 80, 4, 3, batch=1, dtype="fp8", layout="nhwc", residual=True, relu=True,
            shortcut_channels=80, shortcut_stride=2, output="fp16"),
)  # fmt: skip
"""Small problems that between them have odd sizes, every epilogue, stride, dilation, groups, filters that are not
square, shortcuts and FP8."""


HOPPER = ("stem", "window", "streamed_window", "overlapped_store", "swapped_operands", "cluster_split_k")
"""Rungs with Hopper's own units; which of them is fastest is for the tuner to say."""
PREFERENCE = {
    "fp32": ("implicit_gemm", "tuned", "direct"),
    "tf32": (*HOPPER, "fused_epilogue", "tuned", "direct"),
    "fp16": (*HOPPER, "fused_epilogue", "tuned", "direct"),
    "bf16": (*HOPPER, "fused_epilogue", "tuned", "direct"),
    "fp8": ("persistent", "cluster_split_k", "fused_epilogue"),
}
"""Rungs by dtype and layout, from the fastest known to the one that can do everything."""
FP32_NHWC = (
    "wgmma_split",
    "tensor_core_split",
    "winograd_f4_split",
    "winograd_f4_pipelined",
    "implicit_gemm",
    "tuned",
    "direct",
)
"""Rungs for fp32 in NHWC, where tensor cores help with operands split in two, and Winograd's algorithm on top of
them."""
WINOGRAD_PIXELS = 25_000
"""Output pixels from which Winograd's fewer products are worth its three launches: a guess between the batches of 1
and 32 of 64to64_56_k3s1, of which the first was faster without it and the second with it."""
FEW_CHANNELS = 8
"""Channels up to which rows of the implicit GEMM are too short for tensor cores in fp32."""
SHORTCUT = (*HOPPER, "persistent", "wgmma_split", "fused_epilogue")
"""What goes on from x to a second image."""
GROUPED = ("depthwise", "grouped")
"""Rungs for channels in groups; the others have no part in tensor cores then."""
LARGE_FILTER = ("fft_fused", "fft")
"""Preferred to all of the above from `LARGE_FILTER_TAPS` taps on."""
LARGE_FILTER_TAPS = {"fp32": 49, "tf32": 121, "fp16": 121, "bf16": 121}
"""Taps from which a filter is large: in fp32 by the measured crossover (docs/ladder.md), with room for few channels; on
tensor cores an estimate."""
WORTH_CONVERTING = (*HOPPER, "persistent", "fused_epilogue", "grouped")
"""Taken in another layout than the problem's if need be: tensor cores gain more than two transpositions cost."""


def _preference(problem: Conv2dProblem) -> tuple[str, ...]:
    if problem.dtype != "fp32" or problem.layout != "nhwc":
        return PREFERENCE[problem.dtype]
    if problem.channels <= FEW_CHANNELS:
        return tuple(reversed(FP32_NHWC[:-1])) + FP32_NHWC[-1:]
    winograd = tuple(name for name in FP32_NHWC if name.startswith("winograd"))
    return (winograd if problem.output_pixels >= WINOGRAD_PIXELS else ()) + FP32_NHWC


class Conv2d(Operation[Conv2dProblem]):
    name = "conv2d"
    ladder = Ladder(
        "conv2d",
        (
            *direct.RUNGS,
            *gemm.RUNGS,
            *tensor_core.RUNGS,
            *hopper.RUNGS,
            *hopper_persistent.RUNGS,
            *hopper_window.RUNGS,
            *hopper_streamed_window.RUNGS,
            *hopper_split.RUNGS,
            *stem.RUNGS,
            *winograd.RUNGS,
            *fft.RUNGS,
            *depthwise.RUNGS,
            *grouped.RUNGS,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = ("fp32", "tf32", "fp16", "bf16", "fp8")
    layouts = ("nchw", "nhwc")

    def preferred(self, problem: Conv2dProblem) -> tuple[str, ...]:
        if problem.shortcut_channels:
            return SHORTCUT
        large = problem.taps >= LARGE_FILTER_TAPS.get(problem.dtype, problem.taps + 1)
        by_group = GROUPED if problem.groups > 1 else ()
        return by_group + (LARGE_FILTER if large else ()) + _preference(problem)

    def forms(self, rung: str, problem: Conv2dProblem) -> tuple[Conv2dProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        others = (layout for layout in self.layouts if layout != problem.layout)
        return (problem, *(replace(problem, layout=layout) for layout in others))

    def parse(self, name: str) -> Conv2dProblem:
        return Conv2dProblem.parse(name)

    def inputs(self, problem: Conv2dProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: Conv2dProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


CONV2D = Conv2d()
