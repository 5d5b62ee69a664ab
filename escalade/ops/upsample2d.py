"""Images at another size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Codec, Named, NamePattern, spell_pair
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_images,
    check_problem,
    empty_images_like,
    layout_of,
    require_32_bits,
)
from escalade.ops.shared.pooling import empty_output, random_inputs

# --- the problem


MODES = {"nearest": 1, "nearest_exact": 1, "bilinear": 2, "bicubic": 4}
"""Pixels along each dimension that a result is made of."""


@dataclass(frozen=True)
class Upsample2dProblem(Images, Named):
    """y[oh, ow] = x at row (oh + 0.5) * step - 0.5 and the column likewise, from the nearest pixel or between several.

    The step is the image's size divided by the result's, or 1 / factor where a factor is given, which PyTorch takes
    for as exact as the sizes that it has rounded. With `corners` the corners of both images are the same points: the
    row is oh * (H - 1) / (OH - 1). The nearest pixel is PyTorch's: at oh * step rounded down, in `nearest_exact` at
    (oh + 0.5) * step.
    """

    NAME: ClassVar = NamePattern(
        "upsampling",
        "{channels}_{height,width}to{output}_b{batch}_{mode:nearest_exact|nearest|bilinear|bicubic}"
        "{corners?_corners}[_by{factors}]",
        factors=Codec(
            r"[\d.e+-]+x[\d.e+-]+", lambda text: tuple(map(float, text.split("x"))), "{0[0]}x{0[1]}".format
        ),
    )

    output: tuple[int, int]
    mode: str = "nearest"
    corners: bool = False
    factors: tuple[float, float] = (0.0, 0.0)
    """How many times as high and as wide, where places follow these; 0: they follow the sizes."""
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_height(self) -> int:
        return self.output[0]

    @property
    def output_width(self) -> int:
        return self.output[1]

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    @property
    def taps(self) -> int:
        """Pixels along each dimension that a result is made of."""
        return MODES[self.mode]

    @property
    def steps(self) -> tuple[float, float]:
        """Pixels of x from one of y to the next."""
        sizes = zip((self.height, self.width), self.output, self.factors, strict=True)
        down, along = (step_of(size, outputs, self.corners, factor) for size, outputs, factor in sizes)
        return down, along

    @property
    def flops(self) -> int:
        """Products and additions of the sums."""
        return 2 * self.output_elements * self.taps * self.taps

    @property
    def bytes(self) -> int:
        """Where the result is smaller, pixels that none is made of need not be read."""
        sizes = zip((self.height, self.width), self.output, strict=True)
        rows, columns = (min(size, self.taps * outputs) for size, outputs in sizes)
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A place between n pixels is off by up to n * 2^-24 of a pixel, and so are the weights, of which several are
        multiplied and added; copies are exact."""
        return 2.0**-24 * (max(self.height, self.width) + self.taps) if self.taps > 1 else 0.0


def step_of(size: int, outputs: int, corners: bool, factor: float) -> float:
    """Pixels of x from one of y to the next, as PyTorch computes them."""
    if corners:
        return (size - 1) / (outputs - 1) if outputs > 1 else 0.0
    return 1.0 / factor if factor else size / outputs


def fits(size: int, outputs: int, factor: float) -> bool:
    """Whether a factor, if there is one, makes about so many pixels of those: then its steps stay inside the image."""
    return factor == 0.0 or (math.isfinite(factor) and abs(size * factor - outputs) <= 1)


def _check(p: Upsample2dProblem) -> None:
    check_problem("upsample2d", p)
    require("upsample2d", "mode", p.mode, tuple(MODES))
    require_at_least(1, {"output": min(p.output)})
    if p.corners and p.taps == 1:
        raise UnsupportedError(f"mode {p.mode} with corners: only bilinear and bicubic take them")
    sizes = zip((p.height, p.width), p.output, p.factors, strict=True)
    if min(p.factors) < 0 or not all(fits(*size) for size in sizes):
        raise UnsupportedError(
            f"factors of {p.factors[0]} and {p.factors[1]}: they do not make {spell_pair(p.output)} pixels of "
            f"{spell_pair((p.height, p.width))}"
        )
    if max(p.height, p.width, *p.output) >= 2**24:
        raise UnsupportedError(f"{p.name}: upsample2d takes sizes of less than 2^24")
    check_pitches(p, x=p.channels, y=p.channels)
    apart = max(p.channels, p.x_pitch, p.y_pitch)
    require_32_bits("upsample2d", apart * max(p.pixels, p.output_height * p.output_width))


# --- rungs, arguments: how upsample2d reaches a kernel: the constants and arguments that its rungs share


def kernel_constants(problem: Upsample2dProblem) -> dict[str, Constant]:
    return {
        **pooling.constants(problem),
        "TAPS": problem.taps,
        "EXACT": problem.mode == "nearest_exact",
        "CORNERS": problem.corners,
    }


def passed(problem: Upsample2dProblem) -> tuple[Argument, ...]:
    return (Buffer("x"), Buffer("y"), pooling.shape(problem), *problem.steps)


# --- rungs, naive: one thread per output


class Naive(Rung[Upsample2dProblem, ThreadsConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: Upsample2dProblem, config: ThreadsConfig) -> Recipe:
        layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
        call = KernelCall(
            Program.of("upsample2d/naive.cu", "upsample2d_naive", kernel_constants(problem) | layout),
            (blocks(problem.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
NAIVE = Naive("naive", "one thread an output, its pixels read from global memory", None, None)


# --- rungs, runs: neighbouring outputs of a plane a thread


@dataclass(frozen=True)
class RunsConfig(Config):
    rows: int
    columns: int
    """Neighbouring outputs that a thread takes, down and along."""
    threads: int = 256

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        groups = blocks(p.output_height, self.rows) * (p.output_width // self.columns)
        return p.batch * p.channels * groups


class Runs(Rung[Upsample2dProblem, RunsConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if RunsConfig(1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: Upsample2dProblem) -> tuple[RunsConfig, ...]:
        """Copies are stored 16 bytes at once; sums share the columns of several rows instead."""
        widest = widest_vector(problem.dtype, problem.output_width)
        copies, sums = RunsConfig(1, widest), RunsConfig(4, min(2, widest))
        return (copies, sums) if problem.taps == 1 else (sums, copies)

    def recipe(self, problem: Upsample2dProblem, config: RunsConfig) -> Recipe:
        run = {"ROWS": config.rows, "COLUMNS": config.columns}
        call = KernelCall(
            Program.of("upsample2d/runs.cu", "upsample2d_runs", kernel_constants(problem) | run),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
RUNS = Runs(
    "runs",
    "neighbouring outputs of a plane a thread, whose place, rows and columns are found once",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 20 an output (18 us).
    predicted_gain=5.0,
)


# --- rungs, doubled: twice as high and wide, between pixels, with weights that are known beforehand


_OUTPUTS = RunsConfig(4, 4)
"""Outputs of a thread, down and along: OUTPUTS of the kernel."""


class Doubled(Rung[Upsample2dProblem, ThreadsConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        p = problem
        if p.layout != "nchw":
            return f"{self.name} takes layout nchw, not {p.layout}"
        twice = (2 * p.height, 2 * p.width)
        if p.mode != "bilinear" or p.corners or p.output != twice or p.steps != (0.5, 0.5) or p.width % 2:
            return f"{self.name} makes images of even width twice as high and wide, bilinear without corners"
        if _OUTPUTS.threads_for(p) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {p.name}"
        return unsupported_pitch(self.name, p)

    def configs(self, problem: Upsample2dProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128))

    def recipe(self, problem: Upsample2dProblem, config: ThreadsConfig) -> Recipe:
        call = KernelCall(
            Program.of("upsample2d/doubled.cu", "upsample2d_doubled", kernel_constants(problem)),
            (blocks(_OUTPUTS.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
DOUBLED = Doubled(
    "doubled",
    "4 x 4 outputs a thread, made of 4 x 4 pixels that are loaded once, with weights that are known beforehand",
    below="runs",
    # a load and 8 instructions an output against 4 and 27
    predicted_gain=2.5,
)


# --- rungs, vectorised: sixteen bytes of channels a thread, for a run of outputs


BUSY_THREADS = 2 * 2048
"""Threads a multiprocessor that fill it twice."""


@dataclass(frozen=True)
class ColumnsConfig(Config):
    columns: int
    """Neighbouring outputs that a thread takes."""
    threads: int = 128

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * p.output_height * blocks(p.output_width, self.columns) * vectors


class Vectorised(Rung[Upsample2dProblem, ColumnsConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if ColumnsConfig(1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[ColumnsConfig, ...]:
        """The longest run that leaves the card busy."""
        every = tuple(ColumnsConfig(columns) for columns in (4, 2, 1))
        busy = BUSY_THREADS * self.card.multiprocessors
        default = next((run for run in every if run.threads_for(problem) >= busy), every[-1])
        return tuple(sorted(every, key=lambda run: run != default))

    def recipe(self, problem: Upsample2dProblem, config: ColumnsConfig) -> Recipe:
        run = {"VECTOR": widest_vector(problem.dtype, problem.channels), "OUTPUT_COLUMNS": config.columns}
        call = KernelCall(
            Program.of("upsample2d/vectorised.cu", "upsample2d_vectorised", kernel_constants(problem) | run),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose row is found once",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 18 us: a fifth more than the rate of memory.
    predicted_gain=5.0,
)


# --- problems to measure and to test


PROBLEMS = tuple(Upsample2dProblem(32, 64, 56, 56, (112, 112), mode) for mode in MODES)
"""What `escalade ladder upsample2d` measures: a decoder's, by every mode."""

SMALL_PROBLEMS = (
    *(Upsample2dProblem(2, 16, 5, 7, (10, 14), mode) for mode in MODES),
    Upsample2dProblem(1, 3, 5, 6, (10, 12), "bilinear"),
    Upsample2dProblem(1, 12, 7, 5, (3, 11), "bilinear", corners=True),
    Upsample2dProblem(1, 3, 4, 6, (9, 1), "bicubic", corners=True),
    Upsample2dProblem(1, 8, 5, 5, (6, 13), "bilinear", factors=(1.3, 2.7)),
    Upsample2dProblem(1, 5, 7, 6, (16, 16), "nearest", factors=(2.3, 2.7)),
    Upsample2dProblem(2, 5, 9, 10, (4, 7), "nearest_exact"),
    Upsample2dProblem(2, 8, 1, 1, (3, 5), "bicubic"),
    Upsample2dProblem(1, 12, 3, 3, (6, 6), "bilinear", layout="nhwc", x_pitch=24, y_pitch=40),
)
"""Small problems that between them have every mode, both rules for corners, factors of their own, results that are
larger, smaller and one pixel, odd channels, and parts of larger buffers."""


# --- the reference


_aten: Any = torch.ops.aten
_FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "nearest": _aten.upsample_nearest2d,
    "nearest_exact": _aten._upsample_nearest_exact2d,
    "bilinear": _aten.upsample_bilinear2d,
    "bicubic": _aten.upsample_bicubic2d,
}
_BACKWARD: dict[str, Callable[..., torch.Tensor]] = {
    "nearest": _aten.upsample_nearest2d_backward,
    "nearest_exact": _aten._upsample_nearest_exact2d_backward,
    "bilinear": _aten.upsample_bilinear2d_backward,
    "bicubic": _aten.upsample_bicubic2d_backward,
}


def exact(problem: Upsample2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64; the nearest pixel is that of places in fp32, as PyTorch has it in every dtype."""
    x = inputs["x"]
    return _of(problem, x.float() if problem.taps == 1 else x.double()).double()


def peer(problem: Upsample2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result as PyTorch computes it on a GPU, the sums in fp32; on a CPU that takes fp32 tensors."""
    x = inputs["x"]
    return _of(problem, x if x.is_cuda else x.float()).to(x.dtype)


def _of(p: Upsample2dProblem, x: torch.Tensor) -> torch.Tensor:
    return resized(x, p.output, p.mode, p.corners, p.factors)


def resized(
    x: torch.Tensor, output: tuple[int, int], mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    """PyTorch's result, in x's dtype."""
    return _FORWARD[mode](x, output, *_settings(mode, corners, factors))


def gradient(
    of_y: torch.Tensor, size: torch.Size, mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    """PyTorch's gradient of x, which has that size."""
    return _BACKWARD[mode](of_y, of_y.shape[2:], size, *_settings(mode, corners, factors))


def _settings(mode: str, corners: bool, factors: tuple[float, float]) -> tuple[Any, ...]:
    given = tuple(factor or None for factor in factors)
    return given if mode.startswith("nearest") else (corners, *given)


# --- the operation


class Upsample2d(Operation[Upsample2dProblem]):
    name = "upsample2d"
    problem = Upsample2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("upsample2d", (NAIVE, RUNS, DOUBLED, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Upsample2dProblem) -> tuple[str, ...]:
        return ("vectorised", "doubled", "runs", "naive")


UPSAMPLE2D = Upsample2d()


# --- the PyTorch operator


_SCHEMA = "upsample2d(Tensor x, SymInt[2] output, str mode, bool corners, float[2] factors, str? rung=None) -> Tensor"


def upsample2d(
    x: torch.Tensor,
    output: int | Sequence[int],
    mode: str = "nearest",
    *,
    align_corners: bool = False,
    factors: tuple[float, float] = (0.0, 0.0),
    rung: str | None = None,
) -> torch.Tensor:
    """An image at another size, as `torch.nn.functional.interpolate` in the modes that the problem takes.

    `factors` are those of height and width where places follow them instead of the sizes; 0: they follow the sizes.
    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    size = pooling.as_pair(output, "output")
    return OPERATOR(x, size, mode, align_corners, factors, rung)


def _plan(
    x: torch.Tensor,
    output: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    rung: str | None = None,
) -> CallPlan:
    check_images("upsample2d", x)
    batch, channels, height, width = x.shape
    problem = Upsample2dProblem(
        batch, channels, height, width, (output[0], output[-1]), mode, align_corners, (factors[0], factors[-1]),
        dtype_of("upsample2d", x), layout_of(x),
    )  # fmt: skip
    return pooling.plan(UPSAMPLE2D, problem, x, rung)


def _fake(
    x: torch.Tensor,
    output: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    rung: str | None = None,
) -> torch.Tensor:
    check_images("upsample2d", x)
    if min(output) < 1:
        raise UnsupportedError(f"output of {list(output)}: it must be at least 1")
    return empty_images_like(x, (x.shape[0], x.shape[1], output[0], output[1]))


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
