"""Pixel shuffle: channels to pixels and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared.image_packs import ImagePacks, PacksRung
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_problem,
    empty_images,
    empty_images_like,
    form_of,
    require_32_bits,
)
from escalade.ops.shared.pooling import random_inputs

# --- the problem


@dataclass(frozen=True)
class PixelShuffleProblem(Images, Named):
    """y[c, h * factor + i, w * factor + j] = x[(c * factor + i) * factor + j, h, w]; with `down` the inverse."""

    NAME: ClassVar = NamePattern("pixel shuffle", "{channels}_{height,width}_{down?down:up}{factor}_b{batch}")

    factor: int
    down: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""

    rounding = 0.0

    def __post_init__(self) -> None:
        check_problem("pixel_shuffle", self)
        require_at_least(1, {"factor": self.factor})
        sizes = {"height": self.height, "width": self.width} if self.down else {"channels": self.channels}
        parts = self.factor if self.down else self.factor**2
        for what, size in sizes.items():
            if size % parts:
                raise UnsupportedError(
                    f"{what} is {size}: with a factor of {self.factor} it must be a multiple of {parts}"
                )
        check_pitches(self, x=self.channels, y=self.output_channels)
        read = max(self.channels, self.x_pitch) * self.pixels
        require_32_bits("pixel_shuffle", max(read, self.y_pitch * self.output_height * self.output_width))

    @property
    def output_channels(self) -> int:
        return self.channels * self.factor**2 if self.down else self.channels // self.factor**2

    @property
    def output_height(self) -> int:
        return self.height // self.factor if self.down else self.height * self.factor

    @property
    def output_width(self) -> int:
        return self.width // self.factor if self.down else self.width * self.factor

    @property
    def output_elements(self) -> int:
        return self.elements

    @property
    def small(self) -> tuple[int, int]:
        """Height and width of the smaller of the two images."""
        return (self.output_height, self.output_width) if self.down else (self.height, self.width)

    @property
    def few_channels(self) -> int:
        """Channels of the larger of the two images."""
        return self.channels if self.down else self.output_channels

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]


# --- rungs


def arguments(problem: PixelShuffleProblem) -> tuple[Argument, ...]:
    p = problem
    x_step, y_step = p.x_pitch or p.channels, p.y_pitch or p.output_channels
    large, small = (x_step, y_step) if p.down else (y_step, x_step)
    shape = Ints.of("pixel_shuffle/shuffle.cuh", "Shuffle", problem=p, large_step=large, small_step=small)
    return Buffer("x"), Buffer("y"), shape


class Naive(ThreadsRung[PixelShuffleProblem]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("pixel_shuffle/naive.cu", problem=problem)
        return launch(program, blocks(problem.elements, config.threads), config.threads, *arguments(problem))


# Predictions are for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
NAIVE = Naive("naive", "one thread per element, in the order of the larger image", None, None)


class Runs(PacksRung[PixelShuffleProblem]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        return self._packs(problem).unsupported(self.name, problem.name) or unsupported_pitch(
            self.name, problem
        )

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        packs = self._packs(problem)
        program = Program.of("pixel_shuffle/runs.cu", problem=problem, packs=packs)
        return launch(program, packs.grid(config.threads), config.threads, *arguments(problem), packs.shape)

    def _packs(self, problem: PixelShuffleProblem) -> ImagePacks:
        """Return packs of the large image: of whole rows where they are read, since a part of one is scattered."""
        p = problem
        height, width = (size * p.factor for size in p.small)
        packs = ImagePacks.of(p.dtype, p.batch * p.few_channels, height, width)
        return replace(packs, vector=widest_vector(p.dtype, width)) if p.down else packs


RUNS = Runs(
    "runs",
    "16 bytes of the larger image per thread, located once, by multiplications",
    below="naive",
    # 34 million threads with four divisions of 64 bits each (200 us) against 35 us.
    predicted_gain=5.0,
)


# --- rung vectorised: a thread permutes some channels of a whole block of pixels in registers


MOST_BYTES = 256
"""Most bytes that a thread permutes: half of its registers."""


class Vectorized(ThreadsRung[PixelShuffleProblem]):
    threads = (128, 256)

    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {problem.layout}"
        if problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            return f"{self.name} permutes up to {MOST_BYTES} bytes in registers; a factor of {problem.factor} has more"
        if self._threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        vector = self._vector(problem)
        wide = widest_vector(problem.dtype, vector * problem.factor**2)
        program = Program.of("pixel_shuffle/vectorised.cu", problem=problem, vector=vector, wide=wide)
        grid = blocks(self._threads(problem), config.threads)
        return launch(program, grid, config.threads, *arguments(problem))

    def _vector(self, problem: PixelShuffleProblem) -> int:
        """Return the most channels of the larger image that divide evenly and fit a block into registers."""
        vector = widest_vector(problem.dtype, problem.few_channels)
        while vector > 1 and vector * problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            vector //= 2
        return vector

    def _threads(self, problem: PixelShuffleProblem) -> int:
        return problem.elements // (self._vector(problem) * problem.factor**2)


VECTORISED = Vectorized(
    "vectorised",
    "a thread permutes some channels of a block of pixels in registers and moves 16 bytes at once both ways",
    below="naive",
    # 34 million threads of 80 instructions (93 us), and reads of 2 bytes 8 apart; against 32 us.
    predicted_gain=3.0,
)


# --- the reference


def shuffled(x: torch.Tensor, factor: int, down: bool) -> torch.Tensor:
    return F.pixel_unshuffle(x, factor) if down else F.pixel_shuffle(x, factor)


def peer(problem: PixelShuffleProblem, inputs: Tensors) -> torch.Tensor:
    return shuffled(inputs["x"], problem.factor, problem.down)


def empty_output(problem: PixelShuffleProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.output_channels, p.output_height, p.output_width), device)


# --- the operation


class PixelShuffleOperation(Operation[PixelShuffleProblem]):
    name = "pixel_shuffle"
    problem = PixelShuffleProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("pixel_shuffle", (NAIVE, RUNS, VECTORISED))
    problems = (
        PixelShuffleProblem(8, 256, 128, 128, 2),
        PixelShuffleProblem(8, 12, 256, 256, 2),
        PixelShuffleProblem(8, 64, 256, 256, 2, down=True),
    )
    """Problems of `escalade ladder`: an upscaler's features, its RGB image, and a detector's first layer."""
    small_problems = (
        PixelShuffleProblem(2, 32, 3, 4, 2),
        PixelShuffleProblem(1, 12, 5, 3, 2),
        PixelShuffleProblem(1, 36, 2, 3, 3),
        PixelShuffleProblem(2, 16, 4, 8, 2, down=True),
        PixelShuffleProblem(1, 3, 6, 3, 3, down=True),
        PixelShuffleProblem(1, 36, 3, 8, 3),
        PixelShuffleProblem(1, 400, 1, 2, 20),
        PixelShuffleProblem(1, 5, 2, 2, 1),
        PixelShuffleProblem(1, 48, 2, 3, 2, layout="nhwc", x_pitch=64, y_pitch=24),
    )
    """Small problems: both directions, odd factors and channels, a factor too large for registers, and pitches."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "runs", "naive")


PIXEL_SHUFFLE = PixelShuffleOperation()


# --- the PyTorch operator


def pixel_shuffle(
    x: torch.Tensor, factor: int, *, down: bool = False, rung: str | None = None
) -> torch.Tensor:
    """Rearrange channels as pixels, as `torch.nn.functional.pixel_shuffle`; with `down` as `pixel_unshuffle`.

    NCHW and channels_last inputs are read in place and give the result's layout; others are copied first. `rung` names
    a rung of the ladder instead of the chosen one.
    """
    return OPERATOR(x, factor, down, rung)


def _plan(x: torch.Tensor, factor: int, down: bool, rung: str | None = None) -> CallPlan:
    if factor < 1:
        raise UnsupportedError(f"factor is {factor}: it must be at least 1")
    n, c, h, w = x.shape
    size = (c * factor**2, h // factor, w // factor) if down else (c // factor**2, h * factor, w * factor)
    return CallPlan(
        PIXEL_SHUFFLE,
        lambda: empty_images_like(x, (n, *size)),
        lambda: PixelShuffleProblem(n, c, h, w, factor, down, *form_of(x)),
    )


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, ctx.factor, ctx.down, _ = inputs


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    return shuffled(gradient, ctx.factor, not ctx.down), None, None, None


OPERATOR = define_planned("pixel_shuffle", _plan, "x: N C H W", setup=_setup, backward=_backward)
