"""The conv2d operation: its problems, its ladder, foot to summit, and the preferred
order of rungs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d import reference
from escalade.ops.conv2d.problem import DTYPES, Conv2dProblem
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
    _SQUARE(3, 256, 32, 3, batch=256, bias=True, relu=True),
    _SQUARE(3, 256, 32, 3, batch=256, layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(256, 128, 16, 3, batch=256, dtype="fp16", layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(256, 3, 32, 3, batch=256, bias=True),
)  # fmt: skip
"""Measured by `escalade ladder conv2d` in every dtype and layout that a rung supports."""

CROSSOVER = tuple(_SQUARE(32, 32, 64, size, batch=32) for size in (3, 5, 7, 9, 11, 15, 21, 31))
"""Growing filters on one image size: where FFT overtakes the direct algorithms."""

SMALL_PROBLEMS = (
    _SQUARE(8, 16, 9, 3, batch=2),
    _SQUARE(3, 5, 11, 3, batch=1, bias=True),
    _SQUARE(16, 24, 7, 3, batch=3, bias=True, residual=True, relu=True),
    _SQUARE(64, 72, 8, 3, batch=1, relu=True),
    _SQUARE(32, 64, 9, 3, batch=1, bias=True),
    _SQUARE(16, 64, 5, 3, batch=2, relu=True),
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
    _SQUARE(32, 64, 5, 3, batch=2, dtype="int8", layout="nhwc", bias=True, residual=True, relu=True),
    _SQUARE(160, 48, 6, 3, batch=1, dtype="int8", layout="nhwc", stride=2, bias=True, output="fp16"),
    _SQUARE(32, 64, 9, 1, batch=2, dtype="int8", layout="nhwc", bias=True, relu=True, output="fp16", y_pitch=80),
    _SQUARE(16, 128, 5, 3, batch=2, dtype="fp8", layout="nhwc", bias=True, residual=True, output="fp16"),
    _SQUARE(48, 80, 4, 3, batch=1, dtype="fp8", layout="nhwc", residual=True, relu=True,
            shortcut_channels=80, shortcut_stride=2, output="fp16"),
    _SQUARE(48, 48, 9, 3, batch=2, groups=48, dtype="int8", layout="nhwc", bias=True, relu=True),
    _SQUARE(32, 32, 11, 5, batch=1, groups=32, dtype="int8", layout="nhwc", stride=2, bias=True, output="fp16",
            activation="minimum(relu(x), 6.0)"),
    _SQUARE(16, 16, 8, 3, batch=2, groups=16, dtype="fp8", layout="nhwc", bias=True, residual=True),
    _SQUARE(64, 64, 6, 3, batch=2, dtype="fp16", layout="nhwc", bias=True, relu=True, x_pitch=96, y_pitch=144),
    _SQUARE(24, 40, 7, 3, batch=2, stride=2, dtype="fp16", layout="nhwc", x_pitch=48, y_pitch=64),
    _SQUARE(64, 64, 5, 1, dtype="fp16", layout="nhwc", residual=True, y_pitch=80),
    _SQUARE(16, 24, 5, 3, layout="nhwc", bias=True, y_pitch=32),
    _SQUARE(40, 24, 6, 1, batch=2, dtype="fp16", layout="nhwc", bias=True, residual=True,
            prologue="gate * silu(x)"),
    _SQUARE(64, 32, 7, 1, batch=2, stride=2, dtype="fp16", layout="nhwc", bias=True, relu=True,
            prologue="relu(gain * x + shift)"),
    _SQUARE(3, 72, 9, 3, batch=2, layout="nhwc", bias=True, relu=True, pool=(2, 2), places=True),
    _SQUARE(64, 72, 4, 3, dtype="fp16", layout="nhwc", residual=True, pool=(2, 1)),
    _SQUARE(24, 72, 21, 3, batch=3, dtype="fp16", layout="nhwc", epsilon=1e-5, momentum=0.1),
    _SQUARE(64, 136, 9, 1, batch=3, dtype="bf16", layout="nhwc", bias=True, relu=True, epsilon=1e-3),
    _SQUARE(16, 64, 12, 3, batch=2, dtype="tf32", layout="nhwc", stride=2, epsilon=1e-5, momentum=0.25),
    *(
        Conv2dProblem.parse(name, dtype, "nhwc")
        for name, dtype in (
            ("64to40_5x6_k3s1_b2_f4k3s1p1d1_bias+res+relu", "fp16"),
            ("24to72_7x5_k1x3s2x1p0x1d1x2_b3_f5k2s2p1d2", "bf16"),
            ("20to16_4x5_k3s1_b1_f1k3s1p1d1_bias", "tf32"),
            ("72to64_5_k2s1p0_b2_f6k3s1p0d1_eps1e-05+m0.1", "fp16"),
        )
    ),
)  # fmt: skip
"""Tested on the twin: odd sizes, every epilogue, stride, dilation, groups, non-square filters, shortcuts, FP8, pitches,
prologues, pools and statistics."""


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
    **dict.fromkeys(
        ("tf32", "fp16", "bf16"),
        ("resident", "skinny", "col2im", *HOPPER, "ragged", "fused_epilogue", "tuned", "direct"),
    ),
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


FULL_CHANNELS = 64
"""Channels of volumes in 16 bits that fill a k-tile: two layers of 32 to 32 took 621 and 1,538 us where cuDNN took 293
and 736; with 64 channels and more 0.9 to 1.0 times as long as cuDNN."""


class Conv2dOperation(Operation[Conv2dProblem]):
    name = "conv2d"
    problem = Conv2dProblem
    in_pytorch = reference
    ladder = Ladder(
        "conv2d",
        (
            *direct.RUNGS,
            *gemm.RUNGS,
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
    extra_outputs = staticmethod(reference.extra_outputs)
    extra_references = staticmethod(reference.extra_references)
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

    def tuned_as(self, problem: Conv2dProblem) -> Conv2dProblem:
        return replace(problem, epsilon=None, momentum=None) if problem.statistics else problem

    def left_to_pytorch(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.filter_frames == 1 or p.statistics or p.element_bytes != 2 or p.channels >= FULL_CHANNELS:
            return None
        return (
            f"k-tiles of {p.channels} channels are not full; cuDNN took half the time of our kernels with 32"
        )

    def roundings(self, problem: Conv2dProblem) -> int:
        return super().roundings(problem) + bool(problem.prologue)

    def forms(self, rung: str, problem: Conv2dProblem) -> tuple[Conv2dProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        return _in_all_layouts(problem)


CONV2D = Conv2dOperation()
