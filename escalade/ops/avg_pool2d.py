"""The mean over windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, dtype_of
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling, prologue, window_runs, windowed
from escalade.ops.shared.images import LAYOUTS, check_images, layout_of
from escalade.ops.shared.pooling import empty_output
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows, empty_pooled

# --- the problem


@dataclass(frozen=True)
class AvgPool2dProblem(WindowedImages):
    """y[oh, ow] = the sum of x over the window of `kernel` pixels at (oh, ow) * stride - padding, divided.

    What the padding adds is zero. The divisor is the number of pixels of the window in the image with its padding, or
    in the image alone without `count_padding`, or `divisor` unless that is 0.

    With a `prologue`, x is what that makes of its pixels, rounded to the dtype: an expression in `x`, in `gain` and
    `shift`, fp32 vectors of a number a channel, and in `gate`, [N][C] in the dtype.
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
                f"divisor of {self.divisor}: avg_pool2d takes 1 to 2^31 - 1, or 0 for none"
            )

    @property
    def bytes(self) -> int:
        return super().bytes + prologue.operand_bytes(self)

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + math.prod(self.kernel) / 6)


# --- rungs, naive: one thread per output


def rules(problem: AvgPool2dProblem) -> dict[str, Constant]:
    """What kernels/avg_pool2d/divisor.cuh leaves open."""
    return {"COUNT_PADDING": problem.count_padding, "DIVISOR": problem.divisor}


def windows(problem: AvgPool2dProblem) -> Ints:
    """`Windows` of kernels/avg_pool2d/windows.cuh."""
    p = problem
    return Ints((*p.kernel, *p.stride, *p.padding))


class Naive(Rung[AvgPool2dProblem, ThreadsConfig]):
    def supports(self, problem: AvgPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: AvgPool2dProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: AvgPool2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        constants: dict[str, Constant] = {**pooling.constants(p), **rules(p), "NHWC": p.layout == "nhwc"}
        constants |= prologue.constants(p)
        call = KernelCall(
            Program.of("avg_pool2d/naive.cu", "avg_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), *prologue.tensors(), pooling.shape(p), windows(p)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 288 channels of 35 x 35, 3 x 3 windows, batch 32, fp16: 45 MB, 11 us.
NAIVE = Naive("naive", "one thread an output, every window read from global memory", None, None)


# --- rungs, row_packs: sixteen bytes of a row a thread, for a run of outputs in several rows


class RowPacks(window_runs.RowPacks[AvgPool2dProblem]):
    source = "avg_pool2d/row_packs.cu"

    def constants(self, problem: AvgPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | rules(problem) | prologue.constants(problem)

    def operands(self) -> tuple[Argument, ...]:
        return prologue.tensors()


# Predictions for 64 channels of 64 x 64, 3 x 3 windows with stride 2, batch 256, fp16, in NCHW: 168 MB, 40 us.
ROW_PACKS = RowPacks(
    "row_packs",
    "16 bytes of a row a thread, for a run of outputs in two rows",
    below="naive",
    # 17 million threads of 130 instructions each, measured: 177 us. A sixth of the threads, of 150: 45 us.
    predicted_gain=3.9,
)


# --- rungs, vectorised: sixteen bytes of channels a thread, for a run of outputs


class Vectorised(window_runs.ChannelPacks[AvgPool2dProblem]):
    source = "avg_pool2d/vectorised.cu"

    def constants(self, problem: AvgPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | rules(problem) | prologue.constants(problem)

    def operands(self) -> tuple[Argument, ...]:
        return prologue.tensors()


# Predictions for 288 channels of 35 x 35, 3 x 3 windows, batch 32, fp16: 45 MB, 11 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # 11 million threads of 150 instructions (56 us) against 15 us by the rate of L2.
    predicted_gain=3.0,
)


# --- problems to measure and to test


PROBLEMS = (
    AvgPool2dProblem(32, 288, 35, 35, (3, 3), (1, 1), (1, 1)),
    AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2)),
    AvgPool2dProblem(32, 256, 56, 56, (2, 2), (2, 2), prologue="relu(gain * x + shift)"),
)
"""What `escalade ladder avg_pool2d` measures: Inception's and DenseNet's."""

SMALL_PROBLEMS = (
    AvgPool2dProblem(2, 16, 9, 16, (3, 3), (1, 1), (1, 1)),
    AvgPool2dProblem(1, 8, 10, 10, (2, 2), (2, 2)),
    AvgPool2dProblem(2, 3, 11, 11, (3, 3), (2, 2), (1, 1), ceil_mode=True, count_padding=False),
    AvgPool2dProblem(1, 5, 6, 6, (2, 2), (3, 3), (1, 1), ceil_mode=True),
    AvgPool2dProblem(1, 24, 7, 17, (3, 5), (2, 3), (1, 2), divisor=7),
    AvgPool2dProblem(1, 8, 14, 14, (12, 12), (4, 4), (6, 6)),
    AvgPool2dProblem(1, 1, 1, 1, (1, 1), (1, 1)),
    AvgPool2dProblem(2, 12, 7, 5, (3, 3), (2, 2), (1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
    AvgPool2dProblem(2, 16, 7, 6, (3, 3), (2, 2), (1, 1), prologue="gate * (gain * x + shift)"),
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, every divisor,
kernels that are not square, odd sizes, parts of larger buffers, and a prologue that is not zero for zeros."""


# --- the reference


def random_inputs(problem: AvgPool2dProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates."""
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    return pooling.random_inputs(problem, device, seed) | prologue.random_operands(problem, generator)


def exact(problem: AvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _pooled(problem, prologue.apply(problem.prologue, wide)["x"])


def peer(problem: AvgPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The means as PyTorch computes them on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    x = prologue.apply(problem.prologue, inputs)["x"]
    return _pooled(problem, x if x.is_cuda else x.float()).to(x.dtype)


def _pooled(p: AvgPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x, p.kernel, p.stride, p.padding, p.ceil_mode, p.count_padding, p.divisor or None)


# --- the operation


class AvgPool2d(Operation[AvgPool2dProblem]):
    name = "avg_pool2d"
    problem = AvgPool2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("avg_pool2d", (NAIVE, ROW_PACKS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def roundings(self, problem: AvgPool2dProblem) -> int:
        return super().roundings(problem) + bool(problem.prologue)

    def preferred(self, problem: AvgPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "row_packs", "naive")


AVG_POOL2D = AvgPool2d()


# --- the PyTorch operator


_SCHEMA = (
    "avg_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad, "
    "int divisor, str? rung=None) -> Tensor"
)


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
    """The mean of every window, as `torch.nn.functional.avg_pool2d` with a positive divisor.

    The stride is the kernel unless given. NCHW and channels_last inputs are taken as they are (the result
    has x's layout), anything else is copied first. `rung` names one rung of the ladder instead of the
    chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    return OPERATOR(
        x, kernel, stride, padding, ceil_mode, count_include_pad, pooling.divisor("avg_pool2d", divisor_override), rung
    )  # fmt: skip


def _plan(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    rung: str | None = None,
) -> CallPlan:
    check_images("avg_pool2d", x)
    batch, channels, height, width = x.shape
    problem = AvgPool2dProblem(
        batch, channels, height, width, (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of("avg_pool2d", x), layout_of(x),
        count_padding=count_include_pad, divisor=divisor,
    )  # fmt: skip
    return pooling.plan(AVG_POOL2D, problem, x, rung)


def _fake(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int,
    rung: str | None = None,
) -> torch.Tensor:
    return empty_pooled("avg_pool2d", x, kernel, stride, padding, ceil_mode)


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
