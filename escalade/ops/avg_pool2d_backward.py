"""Gradient of avg_pool2d."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.avg_pool2d import OPERATOR as AVG_POOL2D_OPERATOR
from escalade.ops.avg_pool2d import AvgPool2dProblem, windows
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64, summed_in_fp32
from escalade.ops.base.problem import GradientProblem
from escalade.ops.base.rung import Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, SymPair, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS, MEMORY_FORMAT, shape_of
from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.pooling import random_gradient
from escalade.ops.shared.pooling_gradients import (
    PixelTile,
    side_by_side_recipe,
    side_by_side_refusal,
    tile_configs,
    tiles_refusal,
)
from escalade.ops.shared.windowed import windows_per_pixel

# --- the problem


@dataclass(frozen=True)
class AvgPool2dBackwardProblem(GradientProblem[AvgPool2dProblem]):
    """dx of y = avg_pool2d(x), from `gradient` (dy); the result is buffer `y`.

    A pixel's gradient is the sum over the windows that contain it, each divided as the window's sum was. A mean over
    the whole image is one window.
    """

    def __post_init__(self) -> None:
        self.follow("avg_pool2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch:
            raise UnsupportedError(f"{f.name} has a pitch; avg_pool2d_backward supports dense images")
        if f.prologue:
            raise UnsupportedError(f"{f.name} has a prologue, which avg_pool2d_backward does not support")

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> AvgPool2dBackwardProblem:
        """Parse the name of the pool, such as `192_35_k3s1p1_b32`."""
        return AvgPool2dBackwardProblem(AvgPool2dProblem.parse(name, dtype, layout))

    @property
    def bytes(self) -> int:
        f = self.forward
        return (f.elements + f.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Random walk of a running sum; the reciprocal of the divisor and each product with it are rounded too."""
        return 2.0**-24 * math.sqrt(3 + windows_per_pixel(self.forward) / 6)


# --- rungs


class Naive(ThreadsRung[AvgPool2dBackwardProblem]):
    def recipe(self, problem: AvgPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        f = problem.forward
        return launch(
            Program.of("avg_pool2d_backward/naive.cu", problem=f),
            blocks(f.elements, config.threads),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f), windows(f),
        )  # fmt: skip


# Predictions are for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 168 MB, 39 us.
NAIVE = Naive("naive", "one thread per input, which reads every window that contains it", None, None)


class Rows(ThreadsRung[AvgPool2dBackwardProblem]):
    def supports(self, problem: AvgPool2dBackwardProblem) -> str | None:
        return side_by_side_refusal(self.name, problem.forward)

    def recipe(self, problem: AvgPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        buffers = (Buffer("gradient"), Buffer("y"))
        return side_by_side_recipe("avg_pool2d_backward/rows.cu", problem.forward, buffers, config.threads)


ROWS = Rows(
    "rows",
    "up to 16 bytes of a row per thread, for non-overlapping windows in NCHW",
    below="naive",
    # 67 million threads of 130 instructions (300 us) against 43 us: 10% above the DRAM bound.
    predicted_gain=7.0,
)


class Vectorized(Rung[AvgPool2dBackwardProblem, PixelTile]):
    def supports(self, problem: AvgPool2dBackwardProblem) -> str | None:
        return tiles_refusal(self.name, problem.forward)

    def configs(self, problem: AvgPool2dBackwardProblem) -> tuple[PixelTile, ...]:
        return tile_configs(problem.forward, self.card)

    def recipe(self, problem: AvgPool2dBackwardProblem, config: PixelTile) -> Recipe:
        f = problem.forward
        vector = widest_vector(f.dtype, f.channels)
        return launch(
            Program.of("avg_pool2d_backward/vectorised.cu", problem=f, config=config, vector=vector),
            blocks(config.threads_for(f), config.threads),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f),
        )  # fmt: skip


VECTORISED = Vectorized(
    "vectorised",
    "16 bytes of channels per thread, for a tile of pixels whose windows are read once",
    below="naive",
    # 67 million threads of 130 instructions (300 us) against 45 us: 10% above the DRAM bound.
    predicted_gain=6.0,
)


# --- the reference


def random_inputs(problem: AvgPool2dBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    return {"gradient": random_gradient(problem, draw)}


def compute(problem: AvgPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    # PyTorch reads only the shape and layout of x. Its NHWC kernel ignores padding on a GPU (pytorch/pytorch#188344),
    # so padded problems use NCHW.
    f = problem.forward
    memory_format = MEMORY_FORMAT["nchw" if any(f.padding) else problem.layout]
    gradient = inputs["gradient"].contiguous(memory_format=memory_format)
    size = (f.batch, f.channels, f.height, f.width)
    x = torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format)
    backward: Any = torch.ops.aten.avg_pool2d_backward
    result: torch.Tensor = backward(
        gradient, x, f.kernel, f.stride, f.padding, f.ceil_mode, f.count_padding, f.divisor or None
    )
    return result


# --- the operation


class AvgPool2dBackwardOperation(Operation[AvgPool2dBackwardProblem]):
    name = "avg_pool2d_backward"
    problem = AvgPool2dBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(compute), summed_in_fp32(compute))
    ladder = Ladder("avg_pool2d_backward", (NAIVE, ROWS, VECTORISED))
    problems = tuple(
        AvgPool2dBackwardProblem.parse(name)
        for name in ("288_35_k3s1p1_b32", "256_32_k2s2_b256", "2048_7_k7s7_b256")
    )
    """Problems of `escalade ladder`: Inception's overlapping windows, a halving, and ResNet's global mean."""
    small_problems = tuple(
        AvgPool2dBackwardProblem.parse(name)
        for name in (
            "16_9_k3s1p1_b2",
            "8_10_k2s2_b1",
            "3_11_k3s2p1_b2_ceil_inside",
            "5_6_k2s3p1_b1_ceil",
            "24_7x17_k3x5s2x3p1x2_b1_by7",
            "8_14_k12s4p6_b1",
            "8_7_k7s7_b2",
            "1_1_k1s1_b1",
        )
    )
    """Small problems: windows that overlap, touch, leave gaps and cover the image, both roundings, every divisor,
    rectangular kernels, and odd sizes."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "rows", "naive")


AVG_POOL2D_BACKWARD = AvgPool2dBackwardOperation()


# --- the PyTorch operator


_NAME = "avg_pool2d_backward"


def avg_pool2d_backward(
    gradient: torch.Tensor,
    size: int | Sequence[int],
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """Gradient of x in y = avg_pool2d(x, kernel, stride, padding), from that of y; `size` is x's height and width.

    The result has the gradient's layout unless `channels_last` is given, and is deterministic. `rung` names a rung of
    the ladder instead of the chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    return OPERATOR(
        gradient, pooling.as_pair(size, "size"), kernel, stride, pooling.as_pair(padding, "padding"), ceil_mode,
        count_include_pad, pooling.divisor(_NAME, divisor_override), channels_last, rung,
    )  # fmt: skip


def _plan(
    gradient: torch.Tensor,
    size: SymPair,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> CallPlan:
    def problem() -> AvgPool2dBackwardProblem:
        f = AvgPool2dProblem(
            *shape_of(gradient)[:2], *size, kernel, stride, padding, ceil_mode,
            *pooling.backward_form(gradient, channels_last), count_padding=count_include_pad, divisor=divisor,
        )  # fmt: skip
        pooling.check_gradients(f, {}, gradient=gradient)
        return AvgPool2dBackwardProblem(f)

    return CallPlan(
        AVG_POOL2D_BACKWARD, lambda: pooling.empty_gradient(gradient, size, channels_last), problem
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, *ctx.settings, _, _ = inputs


def _backward_op(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """dx is linear in dy, so the gradient of dy is a pooling."""
    return AVG_POOL2D_OPERATOR(gradient, *ctx.settings, None), *(None,) * 9


OPERATOR = define_planned(_NAME, _plan, "gradient: N C P Q", setup=_setup, backward=_backward_op)
