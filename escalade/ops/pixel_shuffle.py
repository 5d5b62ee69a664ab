"""Channels as pixels and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define, require_rung
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_images,
    check_problem,
    empty_images,
    empty_images_like,
    layout_of,
    pack_aligned,
    require_32_bits,
)
from escalade.ops.shared.pooling import random_inputs

# --- the problem


@dataclass(frozen=True)
class PixelShuffleProblem(Images, Named):
    """y[c, h * factor + i, w * factor + j] = x[(c * factor + i) * factor + j, h, w]; with `down` x is made of y so."""

    NAME: ClassVar = NamePattern(
        "pixel shuffle",
        "{channels}_{height,width}_{down?down:up}{factor}_b{batch}",
    )

    factor: int
    down: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("pixel_shuffle", self)
        require_at_least(1, {"factor": self.factor})
        ways = (
            ((self.height, "height"), (self.width, "width")) if self.down else ((self.channels, "channels"),)
        )
        parts = self.factor if self.down else self.factor**2
        for size, what in ways:
            if size % parts:
                raise UnsupportedError(
                    f"{what} of {size}: a factor of {self.factor} takes multiples of {parts}"
                )
        check_pitches(self, x=self.channels, y=self.output_channels)
        apart = max(self.channels, self.x_pitch) * self.pixels
        require_32_bits("pixel_shuffle", max(apart, self.y_pitch * self.output_height * self.output_width))

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
        """Nothing is computed: an element is moved."""
        return self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: every element is one of the inputs."""
        return 0.0


# --- rungs, arguments: how pixel_shuffle reaches a kernel: the constants and arguments that its rungs share


def kernel_constants(problem: PixelShuffleProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype), "DOWN": problem.down, "FACTOR": problem.factor}


def passed(problem: PixelShuffleProblem) -> tuple[Argument, ...]:
    """The buffers, and `Shuffle` of kernels/pixel_shuffle/shuffle.cuh."""
    p = problem
    x_step, y_step = p.x_pitch or p.channels, p.y_pitch or p.output_channels
    few, many = (x_step, y_step) if p.down else (y_step, x_step)
    return Buffer("x"), Buffer("y"), Ints((p.batch, p.few_channels, *p.small, few, many))


# --- rungs, naive: one thread per element


class Naive(Rung[PixelShuffleProblem, ThreadsConfig]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: PixelShuffleProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
        call = KernelCall(
            Program.of("pixel_shuffle/naive.cu", "pixel_shuffle_naive", kernel_constants(problem) | layout),
            (blocks(problem.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
NAIVE = Naive("naive", "one thread an element, in the order of the larger image", None, None)


# --- rungs, runs: neighbours in a row of the larger image a thread


class Runs(Rung[PixelShuffleProblem, ThreadsConfig]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if self._threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: PixelShuffleProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128))

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        run = {"RUN": self._run(problem)}
        call = KernelCall(
            Program.of("pixel_shuffle/runs.cu", "pixel_shuffle_runs", kernel_constants(problem) | run),
            (blocks(self._threads(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))

    def _run(self, problem: PixelShuffleProblem) -> int:
        return widest_vector(problem.dtype, problem.small[1] * problem.factor)

    def _threads(self, problem: PixelShuffleProblem) -> int:
        return problem.elements // self._run(problem)


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
RUNS = Runs(
    "runs",
    "neighbours in a row of the larger image a thread, 16 bytes at once, whose place is found once",
    below="naive",
    # 34 million threads with four divisions of 64 bits each (200 us) against 35 us.
    predicted_gain=5.0,
)


# --- rungs, vectorised: a thread takes some channels of a whole block of pixels, which it sorts in registers


MOST_BYTES = 256
"""What a thread sorts at most: half of what its registers hold."""


class Vectorised(Rung[PixelShuffleProblem, ThreadsConfig]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            return f"{self.name} sorts up to {MOST_BYTES} bytes in registers; a factor of {problem.factor} has more"
        if self._threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: PixelShuffleProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (128, 256))

    def recipe(self, problem: PixelShuffleProblem, config: ThreadsConfig) -> Recipe:
        vector = self._vector(problem)
        whole = vector * problem.factor**2
        run = {"VECTOR": vector, "WIDE": widest_vector(problem.dtype, whole)}
        call = KernelCall(
            Program.of(
                "pixel_shuffle/vectorised.cu", "pixel_shuffle_vectorised", kernel_constants(problem) | run
            ),
            (blocks(self._threads(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))

    def _vector(self, problem: PixelShuffleProblem) -> int:
        """Channels of the larger image: what divides them and leaves a block of pixels in registers."""
        vector = widest_vector(problem.dtype, problem.few_channels)
        while vector > 1 and vector * problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            vector //= 2
        return vector

    def _threads(self, problem: PixelShuffleProblem) -> int:
        return problem.elements // (self._vector(problem) * problem.factor**2)


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
VECTORISED = Vectorised(
    "vectorised",
    "a thread takes some channels of a block of pixels, sorts them in registers and moves 16 bytes at once both ways",
    below="naive",
    # 34 million threads of 80 instructions (93 us), and reads of 2 bytes 8 apart; against 32 us.
    predicted_gain=3.0,
)


# --- problems to measure and to test


PROBLEMS = (
    PixelShuffleProblem(8, 256, 128, 128, 2),
    PixelShuffleProblem(8, 12, 256, 256, 2),
    PixelShuffleProblem(8, 64, 256, 256, 2, down=True),
)
"""What `escalade ladder pixel_shuffle` measures: an upscaler's features, its image in three colours, and a detector's
first layer."""

SMALL_PROBLEMS = (
    PixelShuffleProblem(2, 32, 3, 4, 2),
    PixelShuffleProblem(1, 12, 5, 3, 2),
    PixelShuffleProblem(1, 36, 2, 3, 3),
    PixelShuffleProblem(2, 16, 4, 6, 2, down=True),
    PixelShuffleProblem(1, 3, 6, 3, 3, down=True),
    PixelShuffleProblem(1, 400, 1, 2, 20),
    PixelShuffleProblem(1, 5, 2, 2, 1),
    PixelShuffleProblem(1, 48, 2, 3, 2, layout="nhwc", x_pitch=64, y_pitch=24),
)
"""Small problems that between them have both ways, odd factors and channels, a factor too large for a thread's
registers, and parts of larger buffers."""


# --- the reference


def shuffled(x: torch.Tensor, factor: int, down: bool) -> torch.Tensor:
    """PyTorch's result."""
    return F.pixel_unshuffle(x, factor) if down else F.pixel_shuffle(x, factor)


def peer(problem: PixelShuffleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return shuffled(inputs["x"], problem.factor, problem.down)


def exact(problem: PixelShuffleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})


def empty_output(problem: PixelShuffleProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.output_channels, p.output_height, p.output_width), device)


# --- the operation


class PixelShuffle(Operation[PixelShuffleProblem]):
    name = "pixel_shuffle"
    problem = PixelShuffleProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("pixel_shuffle", (NAIVE, RUNS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: PixelShuffleProblem) -> tuple[str, ...]:
        return ("vectorised", "runs", "naive")


PIXEL_SHUFFLE = PixelShuffle()


# --- the PyTorch operator


def pixel_shuffle(
    x: torch.Tensor, factor: int, *, down: bool = False, rung: str | None = None
) -> torch.Tensor:
    """Channels as pixels, as `torch.nn.functional.pixel_shuffle`; with `down` as `pixel_unshuffle`.

    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    return OPERATOR(x, factor, down, rung)


def _run(x: torch.Tensor, factor: int, down: bool, rung: str | None = None) -> torch.Tensor:
    check_images("pixel_shuffle", x)
    batch, channels, height, width = x.shape
    problem = PixelShuffleProblem(
        batch, channels, height, width, factor, down, dtype_of("pixel_shuffle", x), layout_of(x)
    )
    y = empty_output(problem, x.device)
    if problem.batch == 0:
        require_rung(PIXEL_SHUFFLE, rung)
        return y
    prepare_rung(PIXEL_SHUFFLE, problem, x.device, rung).run({"x": pack_aligned(x, problem.layout), "y": y})
    return y


def _fake(x: torch.Tensor, factor: int, down: bool, rung: str | None = None) -> torch.Tensor:
    check_images("pixel_shuffle", x)
    if factor < 1:
        raise UnsupportedError(f"factor of {factor}: it must be at least 1")
    batch, channels, height, width = x.shape
    if down:
        return empty_images_like(x, (batch, channels * factor**2, height // factor, width // factor))
    return empty_images_like(x, (batch, channels // factor**2, height * factor, width * factor))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, ctx.factor, ctx.down, _ = inputs


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """The other way round, by PyTorch."""
    return shuffled(gradient, ctx.factor, not ctx.down), None, None, None


OPERATOR = define(
    "pixel_shuffle(Tensor x, int factor, bool down, str? rung=None) -> Tensor", _run, _fake, setup=_setup,
    backward=_backward,
)  # fmt: skip
