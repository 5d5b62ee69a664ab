"""Images with more around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import Rung, ThreadsConfig
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


MODES = ("constant", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Pad2dProblem(Images, Named):
    """y[oh, ow] = x[oh - top, ow - left], and beyond the image what the mode says.

    That is a constant, the image mirrored at its outermost pixels, its outermost pixels again, or the image from its
    other side. A negative pad leaves pixels out.
    """

    NAME: ClassVar = NamePattern(
        "padding",
        "{channels}_{height,width}_pad{pads}_b{batch}_{mode:constant|reflect|replicate|circular}[({value})]",
        value=Codec("[^)]+", float),
    )

    pads: tuple[int, int, int, int]
    """Rows above and below, columns to the left and to the right."""
    mode: str = "constant"
    value: float = 0.0
    """The constant."""
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("pad2d", self)
        require("pad2d", "mode", self.mode, MODES)
        sentence = refusal((self.height, self.width), self.pads, self.mode)
        if sentence:
            raise UnsupportedError(sentence)
        if math.isnan(self.value) or (self.value and self.mode != "constant"):
            raise UnsupportedError(
                f"value of {self.value} in mode {self.mode}: a constant is a number, others have none"
            )
        check_pitches(self, x=self.channels, y=self.channels)
        apart = max(self.channels, self.x_pitch, self.y_pitch)
        require_32_bits("pad2d", apart * max(self.pixels, self.output_height * self.output_width))

    @property
    def output_height(self) -> int:
        return self.height + self.pads[0] + self.pads[1]

    @property
    def output_width(self) -> int:
        return self.width + self.pads[2] + self.pads[3]

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    @property
    def flops(self) -> int:
        """Nothing is computed: an element is moved."""
        return self.output_elements

    @property
    def bytes(self) -> int:
        rows, columns = self.height + _cut(self.pads[:2]), self.width + _cut(self.pads[2:])
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: every element is one of the inputs."""
        return 0.0


def _cut(pads: tuple[int, ...]) -> int:
    return sum(min(pad, 0) for pad in pads)


def refusal(size: tuple[int, int], pads: tuple[int, int, int, int], mode: str) -> str | None:
    """Why there is no such image, in a sentence; None if there is."""
    most = {"reflect": 1, "circular": 0}
    for length, before, after in ((size[0], *pads[:2]), (size[1], *pads[2:])):
        if length + _cut((before, after)) < 1 or length + before + after < 1:
            return f"pads of {before} and {after} leave nothing of {length} pixels"
        if mode != "constant" and min(before, after) < 0:
            return f"pads of {before} and {after} in mode {mode}: only a constant takes negative ones"
        if mode in most and max(before, after) > length - most[mode]:
            return f"pads of {before} and {after} in mode {mode}: there are {length} pixels, fewer than that takes"
    return None


# --- rungs, copies: one thread per element, or 16 bytes of channels a thread


@dataclass(frozen=True)
class Copies(Rung[Pad2dProblem, ThreadsConfig]):
    wide: bool
    """Whether a thread takes several channels, of images in NHWC."""

    def supports(self, problem: Pad2dProblem) -> str | None:
        if self.wide and problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if self._threads(problem) >= 2**32 - 2**10:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Pad2dProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Pad2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        constants: dict[str, Constant] = {
            **pooling.constants(p),
            "NHWC": p.layout == "nhwc",
            "MODE": MODES.index(p.mode),
            "VECTOR": self._vector(p),
        }
        call = KernelCall(
            Program.of("pad2d/copies.cu", "pad2d_copies", constants),
            (blocks(self._threads(p), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value),
            overlap=True,
        )
        return Recipe((call,))

    def _vector(self, problem: Pad2dProblem) -> int:
        return widest_vector(problem.dtype, problem.channels) if self.wide else 1

    def _threads(self, problem: Pad2dProblem) -> int:
        return problem.output_elements // self._vector(problem)


# Predictions for 64 channels of 112 x 112 with a row and a column more, batch 32, fp16: 104 MB, 25 us.
NAIVE = Copies("naive", "one thread an element of the result", None, None, wide=False)
VECTORISED = Copies(
    "vectorised",
    "16 bytes of channels a thread",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 25 us at the rate of memory.
    predicted_gain=2.8,
    wide=True,
)


# --- rungs, runs: neighbours in a row of the result a thread


class Runs(Rung[Pad2dProblem, ThreadsConfig]):
    def supports(self, problem: Pad2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if self._threads(problem) >= 2**32 - 2**10:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: Pad2dProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Pad2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        constants: dict[str, Constant] = {
            **pooling.constants(p),
            "MODE": MODES.index(p.mode),
            "RUN": self._run(p),
        }
        call = KernelCall(
            Program.of("pad2d/runs.cu", "pad2d_runs", constants),
            (blocks(self._threads(p), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value),
            overlap=True,
        )
        return Recipe((call,))

    def _run(self, problem: Pad2dProblem) -> int:
        return widest_vector(problem.dtype, problem.output_width)

    def _threads(self, problem: Pad2dProblem) -> int:
        return problem.output_elements // self._run(problem)


# Predictions for 64 channels of 112 x 112 with a row and a column more, batch 32, fp16: 104 MB, 25 us.
RUNS = Runs(
    "runs",
    "neighbours in a row of the result a thread, stored at once, whose place is found once",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 15 an element (26 us) where 8 are stored at once.
    predicted_gain=2.5,
)


# --- problems to measure and to test


PROBLEMS = (
    Pad2dProblem(32, 64, 112, 112, (0, 1, 0, 1)),
    Pad2dProblem(8, 64, 256, 256, (1, 1, 1, 1), "reflect"),
)
"""What `escalade ladder pad2d` measures: in front of a strided convolution, and a generator's mirrored images."""

SMALL_PROBLEMS = (
    Pad2dProblem(2, 16, 5, 6, (0, 1, 2, 3)),
    Pad2dProblem(1, 5, 4, 7, (2, -1, -3, 1), value=-1.5),
    Pad2dProblem(2, 8, 4, 5, (3, 1, 2, 4), "reflect"),
    Pad2dProblem(1, 12, 3, 1, (5, 0, 2, 3), "replicate"),
    Pad2dProblem(1, 3, 4, 3, (4, 1, 0, 3), "circular"),
    Pad2dProblem(1, 1, 1, 1, (0, 0, 0, 0)),
    Pad2dProblem(2, 12, 3, 4, (1, 1, 1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
)
"""Small problems that between them have every mode, constants, pixels that are left out, odd channels, and parts of
larger buffers."""


# --- the reference


def padded(x: torch.Tensor, pads: tuple[int, int, int, int], mode: str, value: float) -> torch.Tensor:
    """PyTorch's result; its pads begin with the last dimension."""
    top, bottom, left, right = pads
    constant = {"value": value} if mode == "constant" else {}
    return F.pad(x, (left, right, top, bottom), mode, **constant)


def peer(problem: Pad2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return padded(inputs["x"], problem.pads, problem.mode, problem.value)


def exact(problem: Pad2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {"x": inputs["x"].double()})


# --- the operation


class Pad2d(Operation[Pad2dProblem]):
    name = "pad2d"
    problem = Pad2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("pad2d", (NAIVE, RUNS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Pad2dProblem) -> tuple[str, ...]:
        return ("vectorised", "runs", "naive")


PAD2D = Pad2d()


# --- the PyTorch operator


_SCHEMA = "pad2d(Tensor x, int[4] pads, str mode, float value, str? rung=None) -> Tensor"


def pad2d(
    x: torch.Tensor,
    pads: Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """An image with so many rows above and below and columns to the left and right, as `torch.nn.functional.pad`.

    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    if not isinstance(pads, Sequence) or len(pads) != 4:
        raise UnsupportedError(f"pads of {pads!r}: they are four, above, below, to the left and to the right")
    return OPERATOR(x, tuple(pads), mode, value, rung)


def _plan(x: torch.Tensor, pads: Sequence[int], mode: str, value: float, rung: str | None = None) -> CallPlan:
    check_images("pad2d", x)
    batch, channels, height, width = x.shape
    top, bottom, left, right = pads
    problem = Pad2dProblem(
        batch, channels, height, width, (top, bottom, left, right), mode, value, dtype_of("pad2d", x), layout_of(x)
    )  # fmt: skip
    return pooling.plan(PAD2D, problem, x, rung)


def _fake(
    x: torch.Tensor, pads: Sequence[int], mode: str, value: float, rung: str | None = None
) -> torch.Tensor:
    check_images("pad2d", x)
    height, width = x.shape[2] + pads[0] + pads[1], x.shape[3] + pads[2] + pads[3]
    return empty_images_like(x, (x.shape[0], x.shape[1], height, width))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, *ctx.settings, _ = inputs
    ctx.save_for_backward(x)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """PyTorch's own: padding is linear, and of x only the shape counts."""
    (x,) = ctx.saved_tensors
    pads, mode, value = ctx.settings
    with torch.enable_grad():
        shape = torch.zeros_like(x, requires_grad=True)
        (grad_x,) = torch.autograd.grad(padded(shape, tuple(pads), mode, value), shape, gradient)
    return grad_x, None, None, None, None


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
