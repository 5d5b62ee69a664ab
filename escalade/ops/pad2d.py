"""Padding of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Rung, ThreadsConfig, first_that
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Sides, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.image_packs import ImagePacks, PacksRung
from escalade.ops.shared.images import (
    LAYOUTS,
    ResizedImages,
    check_problem,
    empty_images_like,
    form_of,
)
from escalade.ops.shared.pooling import empty_output, random_inputs

# --- the problem


MODES = ("constant", "reflect", "replicate", "circular")
GRADIENTS = {mode: f"{mode}_gradient" for mode in MODES[1:]}
"""Modes of gradients, which crop an image and add the pixels cut off to those that padding had copied them from."""


@dataclass(frozen=True)
class Pad2dProblem(ResizedImages, Named):
    """y[oh, ow] = x[oh - top, ow - left]; outside the image the mode decides, as in `torch.nn.functional.pad`.

    A negative pad crops. In the mode of a gradient all pads are those of the padding, negated.
    """

    NAME: ClassVar = NamePattern(
        "padding",
        "{channels}_{height,width}_pad{pads}_b{batch}_"
        "{mode:constant|reflect_gradient|reflect|replicate_gradient|replicate|circular_gradient|circular}[({value})]",
        value=Codec("[^)]+", float),
    )

    pads: tuple[int, int, int, int]
    """Top, bottom, left, right."""
    mode: str = "constant"
    value: float = 0.0
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""

    def __post_init__(self) -> None:
        check_problem("pad2d", self)
        require("pad2d", "mode", self.mode, (*MODES, *GRADIENTS.values()))
        sentence = refusal((self.height, self.width), self.pads, self.mode)
        if sentence:
            raise UnsupportedError(sentence)
        if math.isnan(self.value) or (self.value and self.mode != "constant"):
            raise UnsupportedError(
                f"value is {self.value} in mode {self.mode}: only mode constant has one, and it must not be NaN"
            )
        self.check_pitches("pad2d")

    @property
    def output_height(self) -> int:
        return self.height + self.pads[0] + self.pads[1]

    @property
    def output_width(self) -> int:
        return self.width + self.pads[2] + self.pads[3]

    @property
    def adds(self) -> bool:
        """True for a gradient."""
        return self.mode in GRADIENTS.values()

    @property
    def mode_number(self) -> int:
        """Place among all modes, gradients in the order of what they are gradients of."""
        return (*MODES, *GRADIENTS.values()).index(self.mode)

    @property
    def rounding(self) -> float:
        """A replicated pixel has the gradients of all its copies, a corner those of rows and columns."""
        if not self.adds:
            return 0.0
        copies = (1 - min(self.pads[0], self.pads[1])) * (1 - min(self.pads[2], self.pads[3]))
        return 2.0**-24 * math.sqrt(copies)

    @property
    def flops(self) -> int:
        return self.elements if self.adds else self.output_elements

    @property
    def bytes(self) -> int:
        if self.adds:
            return (self.elements + self.output_elements) * ELEMENT_BYTES[self.dtype]
        rows, columns = self.height + _cut(self.pads[:2]), self.width + _cut(self.pads[2:])
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]


def _cut(pads: tuple[int, ...]) -> int:
    return sum(min(pad, 0) for pad in pads)


def refusal(size: tuple[int, int], pads: tuple[int, int, int, int], mode: str) -> str | None:
    """Return why such padding is invalid; None if it is valid."""
    if mode in GRADIENTS.values():
        if max(pads) > 0:
            return f"pads of {pads} in mode {mode}: those of a gradient are negative"
        cropped = size[0] + sum(pads[:2]), size[1] + sum(pads[2:])
        top, bottom, left, right = pads
        return refusal(cropped, (-top, -bottom, -left, -right), mode.removesuffix("_gradient"))
    most = {"reflect": 1, "circular": 0}
    for length, before, after in ((size[0], *pads[:2]), (size[1], *pads[2:])):
        if length + _cut((before, after)) < 1 or length + before + after < 1:
            return f"pads of {before} and {after} leave nothing of {length} pixels"
        if mode != "constant" and min(before, after) < 0:
            return f"pads of {before} and {after} in mode {mode}: only mode constant supports negative pads"
        if mode in most and max(before, after) > length - most[mode]:
            return f"pads of {before} and {after} in mode {mode} exceed the {length} pixels"
    return None


# --- rungs


@dataclass(frozen=True)
class BandConfig(ThreadsConfig):
    rows: int = 1
    """Outputs per thread."""


_BUSY_THREADS = 1024
"""Threads per SM, with four packs in flight each, that fill it."""


@dataclass(frozen=True)
class Copies(Rung[Pad2dProblem, BandConfig]):
    wide: bool
    """True if a thread takes several channels, in NHWC."""

    def supports(self, problem: Pad2dProblem) -> str | None:
        if self.wide and problem.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {problem.layout}"
        if self._threads(problem, 1) >= 2**32 - 2**10:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Pad2dProblem) -> tuple[BandConfig, ...]:
        """Prefer the most rows that keep the card busy, and small CTAs if there are few."""
        if not self.wide:
            return tuple(BandConfig(threads) for threads in (256, 128, 512))
        busy = _BUSY_THREADS * self.card.multiprocessors
        every = tuple(BandConfig(threads, rows) for threads in (256, 128) for rows in (4, 2, 1))
        return first_that(lambda one: self._threads(problem, one.rows) >= busy, every, BandConfig(128))

    def recipe(self, problem: Pad2dProblem, config: BandConfig) -> Recipe:
        p = problem
        return launch(
            Program.of("pad2d/copies.cu", problem=p, vector=self._vector(p), rows=config.rows),
            blocks(self._threads(p, config.rows), config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value,
        )  # fmt: skip

    def _vector(self, problem: Pad2dProblem) -> int:
        return widest_vector(problem.dtype, problem.channels) if self.wide else 1

    def _threads(self, problem: Pad2dProblem, rows: int) -> int:
        p = problem
        return p.batch * blocks(p.output_height, rows) * p.output_width * (p.channels // self._vector(p))


# Predictions are for 64 channels of 112 x 112 with a row and a column more, batch 32, fp16: 104 MB, 25 us.
NAIVE = Copies("naive", "one thread per element of the result", None, None, wide=False)
VECTORISED = Copies(
    "vectorised",
    "16 bytes of channels per thread, for several outputs of a column in flight",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 25 us, the DRAM bound.
    predicted_gain=2.8,
    wide=True,
)


class Runs(PacksRung[Pad2dProblem]):
    def supports(self, problem: Pad2dProblem) -> str | None:
        if problem.layout != "nchw" or problem.adds:
            return f"{self.name} supports layout nchw and no gradients, not {problem.layout} in mode {problem.mode}"
        return self._packs(problem).unsupported(self.name, problem.name) or unsupported_pitch(
            self.name, problem
        )

    def recipe(self, problem: Pad2dProblem, config: ThreadsConfig) -> Recipe:
        p, packs = problem, self._packs(problem)
        return launch(
            Program.of("pad2d/runs.cu", problem=p, packs=packs),
            packs.grid(config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value, packs.shape,
        )  # fmt: skip

    def _packs(self, problem: Pad2dProblem) -> ImagePacks:
        p = problem
        return ImagePacks.of(p.dtype, p.batch * p.channels, p.output_height, p.output_width)


RUNS = Runs(
    "runs",
    "16 bytes of outputs in linear order per thread, located once, by multiplications",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 20 per element: 25 us, the DRAM bound.
    predicted_gain=2.8,
)


# --- the reference


def padded(x: torch.Tensor, pads: tuple[int, int, int, int], mode: str, value: float) -> torch.Tensor:
    """Pad with PyTorch, whose pads begin with the last dimension."""
    top, bottom, left, right = pads
    if mode in GRADIENTS.values():
        n, c, h, w = x.shape
        with torch.enable_grad():
            cropped = x.new_zeros((n, c, h + top + bottom, w + left + right), requires_grad=True)
            whole = F.pad(cropped, (-left, -right, -top, -bottom), mode.removesuffix("_gradient"))
            return torch.autograd.grad(whole, cropped, x)[0]
    constant = {"value": value} if mode == "constant" else {}
    return F.pad(x, (left, right, top, bottom), mode, **constant)


def peer(problem: Pad2dProblem, inputs: Tensors) -> torch.Tensor:
    return padded(inputs["x"], problem.pads, problem.mode, problem.value)


# --- the operation


class Pad2dOperation(Operation[Pad2dProblem]):
    name = "pad2d"
    problem = Pad2dProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("pad2d", (NAIVE, RUNS, VECTORISED))
    problems = (
        Pad2dProblem(32, 64, 112, 112, (0, 1, 0, 1)),
        Pad2dProblem(8, 64, 256, 256, (1, 1, 1, 1), "reflect"),
        Pad2dProblem(8, 64, 258, 258, (-1, -1, -1, -1), "reflect_gradient"),
    )
    """Problems of `escalade ladder`: before a strided convolution, and a generator's reflection with its gradient."""
    small_problems = (
        Pad2dProblem(2, 16, 5, 6, (0, 1, 2, 3)),
        Pad2dProblem(1, 5, 4, 7, (2, -1, -3, 1), value=-1.5),
        Pad2dProblem(2, 8, 4, 5, (3, 1, 2, 4), "reflect"),
        Pad2dProblem(1, 12, 3, 1, (5, 0, 2, 3), "replicate"),
        Pad2dProblem(1, 3, 4, 3, (4, 1, 0, 3), "circular"),
        Pad2dProblem(1, 1, 1, 1, (0, 0, 0, 0)),
        Pad2dProblem(1, 1, 3, 700, (2, 0, 1, 3), "reflect"),
        Pad2dProblem(2, 5, 3, 2, (0, 1, -1, 0)),
        Pad2dProblem(2, 12, 3, 4, (1, 1, 1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
        Pad2dProblem(2, 8, 9, 13, (-2, -3, -4, 0), "reflect_gradient"),
        Pad2dProblem(1, 12, 9, 6, (-5, 0, -2, -3), "replicate_gradient"),
        Pad2dProblem(1, 5, 11, 6, (-4, -3, 0, -3), "circular_gradient"),
    )
    """Small problems: every mode, constants, cropping, odd channels, rows of one pixel and of several CTAs, pitches."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "runs", "naive")


PAD2D = Pad2dOperation()


# --- the PyTorch operator


def _plan(x: torch.Tensor, pads: Sides, mode: str, value: float, rung: str | None = None) -> CallPlan:
    top, bottom, left, right = pads
    n, c, h, w = x.shape
    return CallPlan(
        PAD2D,
        lambda: empty_images_like(x, (n, c, h + top + bottom, w + left + right)),
        lambda: Pad2dProblem(n, c, h, w, (top, bottom, left, right), mode, value, *form_of(x)),
    )


def pad2d(
    x: torch.Tensor,
    pads: Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Pad an image by `pads` (top, bottom, left, right), as `torch.nn.functional.pad`.

    NCHW and channels_last inputs are read in place and give the result's layout; others are copied first. `rung` names
    a rung of the ladder instead of the chosen one.
    """
    if not isinstance(pads, Sequence) or len(pads) != 4:
        raise UnsupportedError(f"pads is {pads!r}: pass four, for top, bottom, left and right")
    return OPERATOR(x, tuple(pads), mode, value, rung)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, ctx.pads, ctx.mode, *_ = inputs


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """Return the gradient by the same operator; in the mode of a gradient it pads."""
    inverse = {"constant": "constant", **GRADIENTS, **{name: mode for mode, name in GRADIENTS.items()}}
    return (
        OPERATOR(gradient, tuple(-pad for pad in ctx.pads), inverse[ctx.mode], 0.0, None),
        None,
        None,
        None,
        None,
    )


OPERATOR = define_planned("pad2d", _plan, "x: N C H W", setup=_setup, backward=_backward)
