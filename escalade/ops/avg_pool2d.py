"""Mean over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.shared import pooling, prologue
from escalade.ops.shared.images import LAYOUTS, form_of, shape_of
from escalade.ops.shared.pooling import empty_output
from escalade.ops.shared.window_runs import ChannelPacks, RowPacks
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows, empty_pooled

# --- the problem


@dataclass(frozen=True)
class AvgPool2dProblem(WindowedImages):
    """y[oh, ow] = sum of x over the window of `kernel` pixels at (oh, ow) * stride - padding, divided.

    The divisor is the number of window pixels inside the padded image, or inside the image alone without
    `count_padding`, or `divisor` unless that is 0.

    A `prologue` replaces x: an expression in `x`, in `gain` and `shift` (fp32, one per channel), and in `gate` ([N][C]
    in the dtype), rounded to the dtype.
    """

    NAME: ClassVar = NamePattern(
        "pooling",
        f"{WINDOWS}_b{{batch}}{{ceil_mode?_ceil}}{{count_padding?:_inside}}[_by{{divisor}}]{prologue.IN_NAME}",
    )

    count_padding: bool = True
    divisor: int = 0
    prologue: str = ""

    def __post_init__(self) -> None:
        check_windows("avg_pool2d", self)
        prologue.normalize(self)
        if not 0 <= self.divisor < 2**31:
            raise UnsupportedError(
                f"divisor is {self.divisor}: avg_pool2d supports 1 to 2^31 - 1, or 0 for none"
            )

    @property
    def bytes(self) -> int:
        return super().bytes + prologue.operand_bytes(self)

    @property
    def is_even(self) -> bool:
        """True if every window counts as many pixels as the kernel has."""
        sizes = zip(self.reaches, (self.height, self.width), self.padding, strict=True)
        return all(
            reach <= size + padding if self.count_padding else reach <= size and not padding
            for reach, size, padding in sizes
        )

    @property
    def rounding(self) -> float:
        """Random walk of a running sum: each of n additions is off by up to 2^-24 of the partial sum."""
        return 2.0**-24 * math.sqrt(1 + math.prod(self.kernel) / 6)


# --- rungs


def windows(problem: AvgPool2dProblem) -> Ints:
    return Ints.of("avg_pool2d/windows.cuh", "Windows", problem=problem)


class Naive(ThreadsRung[AvgPool2dProblem]):
    def supports(self, problem: AvgPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: AvgPool2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        return launch(
            Program.of("avg_pool2d/naive.cu", constants=prologue.constants(p), problem=p),
            blocks(p.output_elements, config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), *prologue.tensors(), pooling.shape(p), windows(p),
        )  # fmt: skip


NAIVE = Naive("naive", "one thread per output, every window read from global memory", None, None)


# Predicted for 64 channels of 64 x 64, 3 x 3 windows with stride 2, batch 256, fp16, in NCHW: 168 MB, 40 us.
ROW_PACKS = RowPacks[AvgPool2dProblem](
    "row_packs",
    "16 bytes of a row per thread, for a run of outputs in one row, or two if windows overlap",
    below="naive",
    # 17 million threads of 130 instructions each, measured: 177 us. A sixth of the threads, of 150: 45 us.
    predicted_gain=3.9,
    source="avg_pool2d/row_packs.cu",
    operands=prologue.tensors(),
)


# Predicted for 288 channels of 35 x 35, 3 x 3 windows, batch 32, fp16: 45 MB, 11 us.
VECTORISED = ChannelPacks[AvgPool2dProblem](
    "vectorised",
    "16 bytes of channels per thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # 11 million threads of 150 instructions (56 us) against 15 us by the rate of L2.
    predicted_gain=3.0,
    source="avg_pool2d/vectorised.cu",
    operands=prologue.tensors(),
)


# --- the reference


def random_inputs(problem: AvgPool2dProblem, draw: Draw) -> dict[str, torch.Tensor]:
    return pooling.random_inputs(problem, draw) | prologue.random_operands(problem, draw.next)


def exact(problem: AvgPool2dProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _pooled(problem, prologue.apply(problem.prologue, wide)["x"])


def peer(problem: AvgPool2dProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch on a GPU sums in fp32; on a CPU it needs fp32 tensors to do so."""
    x = prologue.apply(problem.prologue, inputs)["x"]
    return _pooled(problem, x if x.is_cuda else x.float()).to(x.dtype)


def _pooled(p: AvgPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, p.kernel, p.stride, p.padding, p.ceil_mode, p.count_padding, p.divisor or None)


# --- the operation


class AvgPool2dOperation(Operation[AvgPool2dProblem]):
    name = "avg_pool2d"
    problem = AvgPool2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("avg_pool2d", (NAIVE, ROW_PACKS, VECTORISED))
    problems = (
        AvgPool2dProblem(32, 288, 35, 35, (3, 3), (1, 1), (1, 1)),
        AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2)),
        AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2), prologue="relu(gain * x + shift)"),
    )
    """Problems of `escalade ladder`: Inception's and DenseNet's."""
    small_problems = (
        AvgPool2dProblem(2, 16, 9, 16, (3, 3), (1, 1), (1, 1)),
        AvgPool2dProblem(1, 8, 10, 10, (2, 2), (2, 2)),
        AvgPool2dProblem(2, 3, 11, 11, (3, 3), (2, 2), (1, 1), ceil_mode=True, count_padding=False),
        AvgPool2dProblem(1, 5, 6, 6, (2, 2), (3, 3), (1, 1), ceil_mode=True),
        AvgPool2dProblem(1, 24, 7, 17, (3, 5), (2, 3), (1, 2), divisor=7),
        AvgPool2dProblem(1, 8, 14, 14, (12, 12), (4, 4), (6, 6)),
        AvgPool2dProblem(1, 1, 1, 1, (1, 1), (1, 1)),
        AvgPool2dProblem(2, 12, 7, 5, (3, 3), (2, 2), (1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
        AvgPool2dProblem(2, 16, 7, 6, (3, 3), (2, 2), (1, 1), prologue="gate * (gain * x + shift)"),
        AvgPool2dProblem(2, 8, 4, 8, (2, 2), (2, 2), prologue="relu(gain * x + shift)"),
    )
    """Small problems: windows that overlap, touch and leave gaps, both roundings, every divisor, rectangular kernels,
    odd sizes, pitches, and a prologue that maps zero to nonzero."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "row_packs", "naive")

    def roundings(self, problem: AvgPool2dProblem) -> int:
        return super().roundings(problem) + bool(problem.prologue)


AVG_POOL2D = AvgPool2dOperation()


# --- the PyTorch operator


def avg_pool2d(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """Mean of every window, as `torch.nn.functional.avg_pool2d` with a positive divisor.

    The stride defaults to the kernel. NCHW and channels_last inputs are read in place and give the result's layout;
    others are copied first. `rung` names a rung of the ladder instead of the chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    return OPERATOR(
        x, kernel, stride, padding, ceil_mode, count_include_pad, pooling.divisor("avg_pool2d", divisor_override), rung
    )  # fmt: skip


def _plan(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    rung: str | None = None,
) -> CallPlan:
    window = (kernel, stride, padding, ceil_mode)
    return CallPlan(
        AVG_POOL2D,
        lambda: empty_pooled(x, *window),
        lambda: AvgPool2dProblem(
            *shape_of(x), *window, *form_of(x), count_padding=count_include_pad, divisor=divisor
        ),
    )


OPERATOR = define_planned("avg_pool2d", _plan, "x: N C H W")
