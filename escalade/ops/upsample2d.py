"""Resizing of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Codec, Named, NamePattern, spell_pair
from escalade.ops.base.operation import Operation, Reference, Tensors, summed_in_fp32
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung, first_that
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Factors, SymPair, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.image_packs import ImagePacks, PacksRung
from escalade.ops.shared.images import (
    LAYOUTS,
    ResizedImages,
    check_problem,
    empty_images_like,
    form_of,
    shape_of,
)
from escalade.ops.shared.pooling import empty_output, random_inputs
from escalade.ops.shared.strips import StripConfig, Strips

# --- the problem


MODES = {"nearest": 1, "nearest_exact": 1, "bilinear": 2, "bicubic": 4}
"""Modes, and the pixels along each dimension that an output is interpolated from."""


@dataclass(frozen=True)
class Upsample2dProblem(ResizedImages, Named):
    """y[oh, ow] = x at row (oh + 0.5) * step - 0.5 and a column likewise, the nearest pixel or interpolated.

    The step is the image's size divided by the result's, or 1 / factor if given, as PyTorch does for a scale factor.
    With `corners` the corner pixels of both images coincide: the row is oh * (H - 1) / (OH - 1). The nearest pixel is
    PyTorch's: floor(oh * step), or in `nearest_exact` floor((oh + 0.5) * step).
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
    """Scale factors of height and width that define the steps; 0: the sizes do."""
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_height(self) -> int:
        return self.output[0]

    @property
    def output_width(self) -> int:
        return self.output[1]

    @property
    def taps(self) -> int:
        return MODES[self.mode]

    @property
    def steps(self) -> tuple[float, float]:
        """Pixels of x per pixel of y."""
        sizes = zip((self.height, self.width), self.output, self.factors, strict=True)
        down, along = (step_of(size, outputs, self.corners, factor) for size, outputs, factor in sizes)
        return down, along

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.output_elements * self.taps * self.taps

    @property
    def bytes(self) -> int:
        """Counts only pixels that contribute, which matters for smaller results."""
        sizes = zip((self.height, self.width), self.output, strict=True)
        rows, columns = (min(size, self.taps * outputs) for size, outputs in sizes)
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """A coordinate among n pixels is off by up to n * 2^-24 of a pixel, as are the weights; copies are exact."""
        return 2.0**-24 * (max(self.height, self.width) + self.taps) if self.taps > 1 else 0.0


def step_of(size: int, outputs: int, corners: bool, factor: float) -> float:
    """Return the pixels of x per pixel of y, as PyTorch computes them."""
    if corners:
        return (size - 1) / (outputs - 1) if outputs > 1 else 0.0
    return 1.0 / factor if factor else size / outputs


def fits(size: int, outputs: int, factor: float) -> bool:
    """Return True if a factor, if given, is consistent with the sizes: then its steps stay inside the image."""
    return factor == 0.0 or (math.isfinite(factor) and abs(size * factor - outputs) <= 1)


def _check(p: Upsample2dProblem) -> None:
    check_problem("upsample2d", p)
    require("upsample2d", "mode", p.mode, tuple(MODES))
    require_at_least(1, {"output": min(p.output)})
    if p.corners and p.taps == 1:
        raise UnsupportedError(f"mode {p.mode} with corners: only bilinear and bicubic support them")
    sizes = zip((p.height, p.width), p.output, p.factors, strict=True)
    if min(p.factors) < 0 or not all(fits(*size) for size in sizes):
        raise UnsupportedError(
            f"factors are {p.factors[0]} and {p.factors[1]}: they do not scale {spell_pair((p.height, p.width))} to "
            f"{spell_pair(p.output)} pixels"
        )
    if max(p.height, p.width, *p.output) >= 2**24:
        raise UnsupportedError(f"{p.name}: upsample2d supports sizes of less than 2^24")
    p.check_pitches("upsample2d")


# --- rungs


def arguments(problem: Upsample2dProblem) -> tuple[Argument, ...]:
    return (Buffer("x"), Buffer("y"), pooling.shape(problem), *problem.steps)


class Naive(ThreadsRung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: Upsample2dProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("upsample2d/naive.cu", problem=problem)
        grid = blocks(problem.output_elements, config.threads)
        return launch(program, grid, config.threads, *arguments(problem))


# Predictions are for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
NAIVE = Naive("naive", "one thread per output, its pixels read from global memory", None, None)


class NearestPacks(PacksRung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if problem.taps > 1:
            return f"{self.name} copies the nearest pixels; use `runs` for mode {problem.mode}"
        return self._packs(problem).unsupported(self.name, problem.name) or unsupported_pitch(
            self.name, problem
        )

    def recipe(self, problem: Upsample2dProblem, config: ThreadsConfig) -> Recipe:
        packs = self._packs(problem)
        program = Program.of(
            "upsample2d/packs.cu", problem=problem, packs=packs, repeats=self._repeats(problem, packs)
        )
        return launch(program, packs.grid(config.threads), config.threads, *arguments(problem), packs.shape)

    def _packs(self, problem: Upsample2dProblem) -> ImagePacks:
        p = problem
        return ImagePacks.of(p.dtype, p.batch * p.channels, p.output_height, p.output_width)

    def _repeats(self, problem: Upsample2dProblem, packs: ImagePacks) -> int:
        """Return how often each pixel occurs in a row, if packs hold whole pixels; otherwise 0.

        Such numbers are powers of two, for which coordinates below 2^23 are exact.
        """
        width, outputs = problem.width, problem.output_width
        repeats = outputs // width
        fitting = repeats and outputs == repeats * width and packs.vector % repeats == 0 and outputs < 2**23
        return repeats if fitting and not packs.straddles and problem.steps[1] == 1 / repeats else 0


PACKS = NearestPacks(
    "packs",
    "16 bytes of the nearest pixels in linear order per thread, located once, by multiplications",
    below="naive",
    # nearest, 56 x 56 to 112 x 112: 26 million threads of 80 instructions (72 us) against 15 us, the DRAM bound.
    predicted_gain=4.8,
)


BUSY_THREADS = 2 * 2048
"""Threads per SM that fill it twice."""
_BUSY_RUNS = 384
"""Threads per SM that are enough with runs of rows: 64 planes of 64 to 128, bicubic, take 26 us with 16 rows and 44
with 4 at batch 16; at batch 1, 5.5 us with 16 rows and 4.2 with 4."""
_STRIP_THREADS = 128


@dataclass(frozen=True)
class TapPattern:
    """Pixels that a thread's columns are interpolated from, if the pattern is the same for all threads."""

    span: int
    """Number of adjacent pixels; 0 if threads differ."""
    offsets: str
    """First tap of each column relative to that of the first, separated by commas."""

    @staticmethod
    def of(problem: Upsample2dProblem, columns: int) -> TapPattern:
        """Return the pattern if `columns` outputs are a whole number of pixels of x, in arithmetic without rounding.

        Bilinear coordinates are cut at the image's edge, which makes its first columns differ.
        """
        step = problem.steps[1]
        is_exact = (step * 64).is_integer() and problem.output_width * step * 64 < 2**23
        if problem.corners or problem.taps == 2 or not is_exact or not (columns * step).is_integer():
            return TapPattern(0, ", ".join("0" * columns))
        firsts = [math.floor(column * step + 0.5 * step - 0.5) for column in range(columns)]
        offsets = [first - firsts[0] for first in firsts]
        return TapPattern(offsets[-1] + problem.taps, ", ".join(map(str, offsets)))


class Runs(Rung[Upsample2dProblem, StripConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if problem.taps == 1:
            return f"{self.name} interpolates; use `packs` for mode {problem.mode}"
        if StripConfig(1, 1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: Upsample2dProblem) -> tuple[StripConfig, ...]:
        """Prefer the longest run of rows that keeps the card busy."""
        columns = min(4, widest_vector(problem.dtype, problem.output_width))
        every = tuple(StripConfig(rows, columns, _STRIP_THREADS) for rows in (16, 8, 4, 2))
        busy = _BUSY_RUNS * self.card.multiprocessors
        return first_that(lambda run: run.threads_for(problem) >= busy, every)

    def recipe(self, problem: Upsample2dProblem, config: StripConfig) -> Recipe:
        strips = Strips.of(problem, config)
        pattern = TapPattern.of(problem, config.columns)
        program = Program.of(
            "upsample2d/runs.cu", problem=problem, config=config, pattern=pattern, strips=strips
        )
        return launch(program, strips.grid, strips.threads, *arguments(problem), strips.shape)


RUNS = Runs(
    "runs",
    "a strip of adjacent columns of a plane per thread, which reads and interpolates each row of x once",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 16 per output (18 us).
    predicted_gain=5.0,
)


_OUTPUTS = StripConfig(4, 4, 1)  # OUTPUTS in the kernel, down and along


class Doubled(ThreadsRung[Upsample2dProblem]):
    threads = (256, 128)

    def supports(self, problem: Upsample2dProblem) -> str | None:
        p = problem
        if p.layout != "nchw":
            return f"{self.name} supports layout nchw, not {p.layout}"
        twice = (2 * p.height, 2 * p.width)
        if p.mode != "bilinear" or p.corners or p.output != twice or p.steps != (0.5, 0.5) or p.width % 2:
            return f"{self.name} doubles images of even width, bilinear without corners"
        if _OUTPUTS.threads_for(p) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {p.name} needs more"
        return unsupported_pitch(self.name, p)

    def recipe(self, problem: Upsample2dProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("upsample2d/doubled.cu", problem=problem)
        grid = blocks(_OUTPUTS.threads_for(problem), config.threads)
        return launch(program, grid, config.threads, *arguments(problem))


DOUBLED = Doubled(
    "doubled",
    "4 x 4 outputs per thread from 4 x 4 pixels that are loaded once, with compile-time weights",
    below="runs",
    # a load and 8 instructions per output against 4 and 27
    predicted_gain=2.5,
)


@dataclass(frozen=True)
class ColumnsConfig(Config):
    columns: int
    """Outputs per thread."""
    threads: int = 128

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * p.output_height * blocks(p.output_width, self.columns) * vectors


class Vectorized(Rung[Upsample2dProblem, ColumnsConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {problem.layout}"
        if ColumnsConfig(1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[ColumnsConfig, ...]:
        """Default to the longest run that keeps the card busy."""
        every = tuple(ColumnsConfig(columns) for columns in (4, 2, 1))
        busy = BUSY_THREADS * self.card.multiprocessors
        return first_that(lambda run: run.threads_for(problem) >= busy, every)

    def recipe(self, problem: Upsample2dProblem, config: ColumnsConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.channels)
        program = Program.of("upsample2d/vectorised.cu", problem=problem, config=config, vector=vector)
        grid = blocks(config.threads_for(problem), config.threads)
        return launch(program, grid, config.threads, *arguments(problem))


VECTORISED = Vectorized(
    "vectorised",
    "16 bytes of channels per thread, for a run of outputs that share a row",
    below="naive",
    # 26 million threads of 120 instructions (107 us) against 18 us: 20% above the DRAM bound.
    predicted_gain=5.0,
)


@dataclass(frozen=True)
class WalkConfig(Config):
    rows: int
    columns: int
    """Outputs per thread, down and along."""
    threads: int = 128

    def threads_for(self, problem: Upsample2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.output_height, self.rows) * blocks(p.output_width, self.columns) * vectors


_WALKING_THREADS = 768
"""Threads per SM at 80 registers each."""


class Walked(Rung[Upsample2dProblem, WalkConfig]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {problem.layout}"
        if problem.taps == 1 or problem.steps[0] > 1:
            return f"{self.name} interpolates images to at least their height"
        if WalkConfig(1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Upsample2dProblem) -> tuple[WalkConfig, ...]:
        """Default to the longest walk that keeps the card busy; bicubic to one column, since two take 211 registers."""
        widths = (2, 1) if problem.taps == 2 else (1, 2)
        every = tuple(WalkConfig(rows, columns) for columns in widths for rows in (16, 8, 4, 2))
        busy = _WALKING_THREADS * self.card.multiprocessors
        return first_that(lambda walk: walk.threads_for(problem) >= busy, every, WalkConfig(2, widths[0]))

    def recipe(self, problem: Upsample2dProblem, config: WalkConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.channels)
        program = Program.of("upsample2d/walked.cu", problem=problem, config=config, vector=vector)
        grid = blocks(config.threads_for(problem), config.threads)
        return launch(program, grid, config.threads, *arguments(problem))


WALKED = Walked(
    "walked",
    "a strip of two columns per thread, which converts and interpolates each row of x once on the way down",
    below="vectorised",
    # 64 channels of 64 x 64, batch 256, fp16: 671 MB, 160 us. 166 instructions per 16 bytes of y take 188 us to issue,
    # 56 take 63.
    predicted_gain=1.25,
)


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


def exact(problem: Upsample2dProblem, inputs: Tensors) -> torch.Tensor:
    """The nearest pixel follows fp32 coordinates, as in PyTorch for every dtype."""
    x = inputs["x"].float() if problem.taps == 1 else inputs["x"].double()
    return compute(problem, {"x": x}).double()


def compute(p: Upsample2dProblem, inputs: Tensors) -> torch.Tensor:
    return resized(inputs["x"], p.output, p.mode, p.corners, p.factors)


def resized(
    x: torch.Tensor, output: tuple[int, int], mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    return _FORWARD[mode](x, output, *_settings(mode, corners, factors))


def gradient(
    of_y: torch.Tensor, size: torch.Size, mode: str, corners: bool, factors: tuple[float, float]
) -> torch.Tensor:
    """Return PyTorch's gradient of x, of shape `size`."""
    return _BACKWARD[mode](of_y, of_y.shape[2:], size, *_settings(mode, corners, factors))


def _settings(mode: str, corners: bool, factors: tuple[float, float]) -> tuple[Any, ...]:
    given = tuple(factor or None for factor in factors)
    return given if mode.startswith("nearest") else (corners, *given)


# --- the operation


class Upsample2dOperation(Operation[Upsample2dProblem]):
    name = "upsample2d"
    problem = Upsample2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, summed_in_fp32(compute))
    ladder = Ladder("upsample2d", (NAIVE, PACKS, RUNS, DOUBLED, VECTORISED, WALKED))
    problems = tuple(Upsample2dProblem(32, 64, 56, 56, (112, 112), mode) for mode in MODES)
    """Problems of `escalade ladder`: a decoder's, in every mode."""
    small_problems = (
        *(Upsample2dProblem(2, 16, 5, 7, (10, 14), mode) for mode in MODES),
        Upsample2dProblem(1, 3, 5, 6, (10, 12), "bilinear"),
        Upsample2dProblem(1, 12, 7, 5, (3, 11), "bilinear", corners=True),
        Upsample2dProblem(1, 3, 4, 6, (9, 1), "bicubic", corners=True),
        Upsample2dProblem(1, 8, 5, 5, (6, 13), "bilinear", factors=(1.3, 2.7)),
        Upsample2dProblem(1, 5, 7, 6, (16, 16), "nearest", factors=(2.3, 2.7)),
        Upsample2dProblem(2, 5, 9, 10, (4, 7), "nearest_exact"),
        Upsample2dProblem(2, 3, 3, 8, (5, 16), "nearest_exact"),
        Upsample2dProblem(2, 8, 1, 1, (3, 5), "bicubic"),
        Upsample2dProblem(1, 1, 3, 330, (6, 660), "bicubic"),
        Upsample2dProblem(1, 12, 3, 3, (6, 6), "bilinear", layout="nhwc", x_pitch=24, y_pitch=40),
    )
    """Small problems: every mode, both rules for corners, explicit factors, results that are larger, smaller and one
    pixel, odd channels, rows of several CTAs, and pitches."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("walked", "vectorised", "doubled", "packs", "runs", "naive")


UPSAMPLE2D = Upsample2dOperation()


# --- the PyTorch operator


def _plan(
    x: torch.Tensor, output: SymPair, mode: str, corners: bool, factors: Factors, rung: str | None = None
) -> CallPlan:
    if min(output) < 1:
        raise UnsupportedError(f"output is {list(output)}: it must be at least 1")
    return CallPlan(
        UPSAMPLE2D,
        lambda: empty_images_like(x, (*x.shape[:2], *output)),
        lambda: Upsample2dProblem(*shape_of(x), output, mode, corners, factors, *form_of(x)),
    )


def upsample2d(
    x: torch.Tensor,
    output: int | Sequence[int],
    mode: str = "nearest",
    *,
    align_corners: bool = False,
    factors: tuple[float, float] = (0.0, 0.0),
    rung: str | None = None,
) -> torch.Tensor:
    """Resize an image, as `torch.nn.functional.interpolate` in mode nearest, nearest_exact, bilinear or bicubic.

    `factors` scale height and width if coordinates follow them instead of the sizes; 0: they follow the sizes.
    NCHW and channels_last inputs are read in place and give the result's layout; others are copied first. `rung` names
    a rung of the ladder instead of the chosen one.
    """
    size = pooling.as_pair(output, "output")
    return OPERATOR(x, size, mode, align_corners, factors, rung)


OPERATOR = define_planned("upsample2d", _plan, "x: N C H W")
