"""Gradient of upsample2d."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.operation import Operation, Reference, Tensors, summed_in_fp32
from escalade.ops.base.problem import GradientProblem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Factors, SymPair, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS
from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.pooling import random_gradient
from escalade.ops.shared.pooling_gradients import ONE_PIXEL, tiles_refusal
from escalade.ops.upsample2d import OPERATOR as UPSAMPLE2D_OPERATOR
from escalade.ops.upsample2d import Upsample2dProblem, resized
from escalade.ops.upsample2d import gradient as of_input

# --- the problem


@dataclass(frozen=True)
class Upsample2dBackwardProblem(GradientProblem[Upsample2dProblem]):
    """dx of y = upsample2d(x), from `gradient` (dy); the result is buffer `y`.

    A pixel's gradient is the weighted sum of the outputs that are interpolated from it.
    """

    def __post_init__(self) -> None:
        self.follow("upsample2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch:
            raise UnsupportedError(f"{f.name} has a pitch; upsample2d_backward supports dense images")

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> Upsample2dBackwardProblem:
        """Parse the name of the upsampling, such as `64_56to112_b32_bilinear`."""
        return Upsample2dBackwardProblem(Upsample2dProblem.parse(name, dtype, layout))

    @property
    def most_outputs(self) -> tuple[int, int]:
        """Most outputs, down and along, that use one pixel."""
        return self.most_outputs_of(1, 1)

    def most_outputs_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the most outputs, down and along, between the first and the last that use a tile of pixels.

        Their coordinates span the tile plus taps - 1 pixels. Rounding adds one at either end, unless no coordinate is
        rounded.
        """
        f = self.forward
        more = 0 if self._exact and not f.corners else 2
        down, along = (
            min(outputs, math.ceil((pixels - 1 + f.taps) / step) + more) if step else outputs
            for pixels, step, outputs in zip((rows, columns), f.steps, f.output, strict=True)
        )
        return down, along

    @property
    def _exact(self) -> bool:
        """True if sizes differ by powers of two, so that no coordinate is rounded."""
        f = self.forward
        sizes = zip(f.steps, (f.height, f.width), f.output, strict=True)
        return all(
            step * outputs == size and math.frexp(step)[0] == 0.5 and step <= 1
            for step, size, outputs in sizes
        )

    @property
    def even(self) -> tuple[int, int] | None:
        """Copies of each pixel, down and along, if the mode is nearest and no coordinate is rounded; else None."""
        f = self.forward
        if f.taps > 1 or not self._exact:
            return None
        return f.output[0] // f.height, f.output[1] // f.width

    @property
    def bytes(self) -> int:
        f = self.forward
        return (f.elements + f.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """The weights' error plus the random walk of a running sum."""
        return self.forward.rounding + 2.0**-24 * math.sqrt(1 + math.prod(self.most_outputs) / 6)


# --- rungs


class PerPixel(ThreadsRung[Upsample2dBackwardProblem]):
    def recipe(self, problem: Upsample2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        f = problem.forward
        return launch(
            Program.of("upsample2d_backward/per_pixel.cu", problem=f),
            blocks(f.elements, config.threads),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps,
        )  # fmt: skip


# Predictions are for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp16: 168 MB, 39 us.
PER_PIXEL = PerPixel(
    "per_pixel", "one thread per input, which finds and sums the outputs that use it", None, None
)


MOST_COLUMNS = 8
"""Most copies of a pixel along a row, since the kernel unrolls them."""


def _vector(problem: Upsample2dBackwardProblem) -> int:
    return widest_vector(problem.dtype, problem.forward.width)


class Rows(ThreadsRung[Upsample2dBackwardProblem]):
    threads = (128,)

    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nchw":
            return f"{self.name} supports layout nchw, not {f.layout}"
        if problem.even is None or problem.even[1] > MOST_COLUMNS:
            return (
                f"{self.name} supports mode nearest at sizes that differ by powers of two, and up to {MOST_COLUMNS} "
                "copies of a pixel along a row"
            )
        if f.elements // _vector(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return None

    def recipe(self, problem: Upsample2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        assert problem.even is not None
        f, vector = problem.forward, _vector(problem)
        rows, columns = problem.even
        return launch(
            Program.of("upsample2d_backward/rows.cu", problem=f, vector=vector, rows=rows, columns=columns),
            blocks(f.elements // vector, config.threads),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f),
        )  # fmt: skip


ROWS = Rows(
    "rows",
    "up to 16 bytes of a row per thread in NCHW, all copies of its pixels loaded by packs",
    below="per_pixel",
    # 17 million threads of 300 instructions (180 us) against 45 us: 10% above the DRAM bound.
    predicted_gain=4.0,
)


# --- rung shared_tile: a tile of the gradient in shared memory, with the outputs and weights of its rows and columns


STATIC_SHARED_BYTES = 48 * 1024
PLANES = (8, 1)
"""Planes per CTA: the outputs and weights of a tile are found once for all of them."""
STAGED_COST, SUMMED_COST = 12, 50
"""Estimates of the instructions per element that is staged, and per pixel that is summed."""
SECTOR = 8
"""Extra cost of a tile row, in elements: rows are not aligned to memory sectors."""
_WORD_BYTES = 4
_TILES = ((16, 16), (8, 32), (4, 32), (8, 16), (8, 8), (4, 8), (1, 32))


@dataclass(frozen=True)
class TileConfig(Config):
    """Tile of dx per CTA, one pixel per thread, and the planes that the CTA computes it for."""

    rows: int
    columns: int
    planes: int

    @property
    def threads(self) -> int:
        return self.rows * self.columns

    def staged(self, problem: Upsample2dBackwardProblem) -> tuple[int, int]:
        """Rows and columns of dy in shared memory."""
        return problem.most_outputs_of(self.rows, self.columns)

    def most_weights(self, problem: Upsample2dBackwardProblem) -> tuple[int, int]:
        """Weights per row and per column; those of the nearest pixel are 1 and need no memory."""
        return problem.most_outputs if problem.forward.taps > 1 else (1, 1)

    def shared_bytes(self, problem: Upsample2dBackwardProblem) -> int:
        down, along = self.most_weights(problem)
        found = self.rows * (2 + down) + self.columns * (2 + along)
        return _WORD_BYTES * (math.prod(self.staged(problem)) + found)

    def blocks(self, problem: Upsample2dBackwardProblem) -> int:
        f = problem.forward
        planes = blocks(f.batch * f.channels, self.planes)
        return planes * blocks(f.height, self.rows) * blocks(f.width, self.columns)

    def cost(self, problem: Upsample2dBackwardProblem) -> int:
        """Return a cost roughly proportional to time, for equal `planes`; pixels beyond the border cost the same."""
        rows, columns = self.staged(problem)
        staged = STAGED_COST * rows * (columns + SECTOR)
        return self.blocks(problem) * (staged + SUMMED_COST * self.threads)


class SharedTile(Rung[Upsample2dBackwardProblem, TileConfig]):
    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nchw":
            return f"{self.name} supports layout nchw, not {f.layout}"
        fitting = self._fitting(problem)
        if not fitting:
            return (
                f"{self.name} holds the outputs of a tile of pixels in {STATIC_SHARED_BYTES // 1024} KB of shared "
                f"memory, which those of {problem.name} exceed; use per_pixel"
            )
        if max(tile.blocks(problem) for tile in fitting) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; {problem.name} needs more"
        return None

    def configs(self, problem: Upsample2dBackwardProblem) -> tuple[TileConfig, ...]:
        """Prefer several planes per CTA unless that leaves too few CTAs, then the cheapest tiles."""

        def order(tile: TileConfig) -> tuple[bool, int, int]:
            idle = tile.planes > 1 and tile.blocks(problem) < self.card.busy_blocks
            return idle, -tile.planes, tile.cost(problem)

        return tuple(sorted(self._fitting(problem), key=order))

    def _fitting(self, problem: Upsample2dBackwardProblem) -> list[TileConfig]:
        tiles = (TileConfig(*tile, planes) for planes in PLANES for tile in _TILES)
        return [tile for tile in tiles if tile.shared_bytes(problem) <= STATIC_SHARED_BYTES]

    def recipe(self, problem: Upsample2dBackwardProblem, config: TileConfig) -> Recipe:
        f = problem.forward
        return launch(
            Program.of("upsample2d_backward/shared_tile.cu", problem=f, backward=problem, config=config),
            config.blocks(problem),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps,
        )  # fmt: skip


# Prediction for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp32: 336 MB, 77 us.
SHARED_TILE = SharedTile(
    "shared_tile",
    "the gradients of a tile are staged in shared memory, the outputs and weights of its rows and columns found once",
    below="per_pixel",
    # per_pixel: 300 instructions per pixel, most of them to find its outputs, 300 us. Without these about 120 are left:
    # 48 for four staged elements, 50 for the sum. Nearest outputs are read by one pixel each, so that staging saves no
    # reads here.
    predicted_gain=2.5,
)


class Vectorized(ThreadsRung[Upsample2dBackwardProblem]):
    threads = (128,)

    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        return tiles_refusal(self.name, problem.forward)

    def recipe(self, problem: Upsample2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        f = problem.forward
        rows, columns = problem.even or problem.most_outputs
        program = Program.of(
            "upsample2d_backward/vectorised.cu",
            problem=f, backward=problem, rows=rows, columns=columns, vector=widest_vector(f.dtype, f.channels),
        )  # fmt: skip
        return launch(
            program,
            blocks(ONE_PIXEL.threads_for(f), config.threads),
            config.threads,
            Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps,
        )  # fmt: skip


VECTORISED = Vectorized(
    "vectorised",
    "16 bytes of channels per thread, all outputs of a pixel loaded at once",
    below="per_pixel",
    # 17 million threads of 300 instructions (180 us) against 45 us: 10% above the DRAM bound.
    predicted_gain=4.0,
)


# --- the reference


def random_inputs(problem: Upsample2dBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    return {"gradient": random_gradient(problem, draw)}


def exact(problem: Upsample2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    gradient = inputs["gradient"].double()
    down, along = (weights(problem.forward, axis, gradient.device) for axis in (0, 1))
    return down.T @ gradient @ along


def weights(f: Upsample2dProblem, axis: int, device: torch.device) -> torch.Tensor:
    """Return the weight of every pixel along an axis in every output, by resizing unit images.

    The nearest pixel follows fp32 coordinates, as in PyTorch for every dtype.
    """
    size, outputs, factor = (f.height, f.width)[axis], f.output[axis], f.factors[axis]
    dtype = torch.float32 if f.taps == 1 else torch.float64
    image = torch.eye(size, dtype=dtype, device=device).view(1, size, size, 1)
    result = resized(image, (outputs, 1), f.mode, f.corners, (factor, 0.0))
    return result.view(size, outputs).T.double()


def compute(problem: Upsample2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    f = problem.forward
    size = torch.Size((f.batch, f.channels, f.height, f.width))
    return of_input(inputs["gradient"], size, f.mode, f.corners, f.factors)


# --- the operation


class Upsample2dBackwardOperation(Operation[Upsample2dBackwardProblem]):
    name = "upsample2d_backward"
    problem = Upsample2dBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, summed_in_fp32(compute))
    ladder = Ladder("upsample2d_backward", (PER_PIXEL, SHARED_TILE, ROWS, VECTORISED))
    problems = tuple(
        Upsample2dBackwardProblem.parse(name)
        for name in ("256_16to32_b256_nearest", "64_56to112_b32_bilinear", "64_56to112_b32_bicubic")
    )
    """Problems of `escalade ladder`: an autoencoder's doubling, and a decoder's interpolations."""
    small_problems = tuple(
        Upsample2dBackwardProblem.parse(name)
        for name in (
            "16_5x7to10x14_b2_nearest",
            "8_5x3to10x12_b1_nearest_exact",
            "16_5x7to10x14_b2_bilinear",
            "12_7x5to3x11_b1_bilinear_corners",
            "8_5to6x13_b1_bilinear_by1.3x2.7",
            "3_4x6to9x1_b1_bicubic_corners",
            "8_1to3x5_b2_bicubic",
            "8_5x7to10x14_b1_bicubic",
            "5_7x6to16_b1_nearest_by2.3x2.7",
            "5_9x10to4x7_b2_nearest_exact",
            "8_3to33_b1_nearest",
            "8_3to30_b1_bilinear",
        )
    )
    """Small problems: every mode, both rules for corners, explicit factors, gradients that are larger, smaller, of one
    pixel and many times as large, and odd channels."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "rows", "per_pixel")


UPSAMPLE2D_BACKWARD = Upsample2dBackwardOperation()


# --- the PyTorch operator


_NAME = "upsample2d_backward"


def upsample2d_backward(
    gradient: torch.Tensor,
    size: int | Sequence[int],
    mode: str = "nearest",
    *,
    align_corners: bool = False,
    factors: tuple[float, float] = (0.0, 0.0),
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """Gradient of x in y = upsample2d(x, ...), from that of y; `size` is x's height and width.

    The result has the gradient's layout unless `channels_last` is given, and is deterministic. `rung` names a rung of
    the ladder instead of the chosen one.
    """
    return OPERATOR(
        gradient, pooling.as_pair(size, "size"), mode, align_corners, factors, channels_last, rung
    )


def _plan(
    gradient: torch.Tensor,
    size: SymPair,
    mode: str,
    corners: bool,
    factors: Factors,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> CallPlan:
    n, c, height, width = gradient.shape

    def problem() -> Upsample2dBackwardProblem:
        form = pooling.backward_form(gradient, channels_last)
        return Upsample2dBackwardProblem(
            Upsample2dProblem(n, c, *size, (height, width), mode, corners, factors, *form)
        )

    return CallPlan(
        UPSAMPLE2D_BACKWARD, lambda: pooling.empty_gradient(gradient, size, channels_last), problem
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gradient, _, *ctx.settings, _, _ = inputs
    ctx.output = gradient.shape[2:]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """dx is linear in dy, so the gradient of dy is an upsampling."""
    return UPSAMPLE2D_OPERATOR(gradient, ctx.output, *ctx.settings, None), *(None,) * 6


OPERATOR = define_planned(_NAME, _plan, "gradient: N C P Q", setup=_setup, backward=_backward)
