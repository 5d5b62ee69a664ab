"""Gradient of max_pool2d."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.problem import GradientProblem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, SymPair, define_planned
from escalade.ops.max_pool2d import (
    NOWHERE,
    PLACES,
    MaxPool2dProblem,
    corners,
    indices_of,
    require_bytes_for_places,
    to_places,
    windows,
)
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS, MEMORY_FORMAT, shape_of
from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.pooling_gradients import side_by_side_recipe, side_by_side_refusal
from escalade.ops.shared.windowed import windows_per_pixel

# --- the problem


_MASK, _STORED = "_mask", "_stored"


@dataclass(frozen=True)
class MaxPool2dBackwardProblem(GradientProblem[MaxPool2dProblem]):
    """dx of y = max_pool2d(x), from `gradient` (dy) and x; the result is buffer `y`.

    An output's gradient is added to its maximum's pixel: the first of equal values, the last of NaNs. With `mask` (x
    is the output of a ReLU) the result is the gradient of the ReLU's input: zero where x is not positive. With
    `stored`, buffer `places` replaces x: the position of each maximum in its window, row-major, in one byte, or 255
    where a ReLU clipped it.
    """

    mask: bool = False
    stored: bool = False

    def __post_init__(self) -> None:
        self.follow("max_pool2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch or f.places:
            raise UnsupportedError(
                f"{f.name} has a pitch or places; max_pool2d_backward needs dense images and a pool without places"
            )
        if self.mask and self.stored:
            raise UnsupportedError(
                f"{f.name} with mask and stored: places already mark clipped maxima; drop mask"
            )
        if self.stored:
            require_bytes_for_places(f.kernel)

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> MaxPool2dBackwardProblem:
        """Parse a name such as `64_112_k3s2p1_b256_mask`: the pool's, then _mask behind a ReLU, or _stored."""
        pool = name.removesuffix(_STORED).removesuffix(_MASK)
        return MaxPool2dBackwardProblem(
            MaxPool2dProblem.parse(pool, dtype, layout), mask=_MASK in name, stored=name.endswith(_STORED)
        )

    @property
    def name(self) -> str:
        """The pool's name with these suffixes; `parse` is the inverse."""
        return f"{self.forward.name}{_MASK * self.mask}{_STORED * self.stored}"

    @property
    def bytes(self) -> int:
        f = self.forward
        written = f.elements * ELEMENT_BYTES[self.dtype]
        if self.stored:
            return written + f.output_elements * (ELEMENT_BYTES[self.dtype] + 1)
        return written + f.bytes

    @property
    def rounding(self) -> float:
        """Random walk of a running sum; exact where windows do not overlap."""
        terms = windows_per_pixel(self.forward)
        return 2.0**-24 * math.sqrt(1 + terms / 6) if terms > 1 else 0.0


# --- rungs

X = Buffer("x", optional=True)


def call(
    problem: MaxPool2dBackwardProblem, rung: str, buffers: tuple[Buffer, ...], elements: int, threads: int
) -> KernelCall:
    """Return the launch of a rung's kernel with one thread per element."""
    f = problem.forward
    program = Program.of(f"max_pool2d_backward/{rung}.cu", problem=f, backward=problem)
    return kernel_call(program, blocks(elements, threads), threads, *buffers, pooling.shape(f), windows(f))


class Atomics(ThreadsRung[MaxPool2dBackwardProblem]):
    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        forward, threads = problem.forward, config.threads
        sums = Workspace("sums", max(1, forward.elements) * 4, zeroed=True)  # fp32
        buffers = (Buffer("gradient"), X, PLACES, Buffer("sums"))
        add = call(problem, self.name, buffers, forward.output_elements, threads)
        finish = kernel_call(
            Program.of("max_pool2d_backward/atomics_finish.cu", problem=forward),
            blocks(forward.elements, threads),
            threads,
            Buffer("sums"), Buffer("y"), Int64(forward.elements),
        )  # fmt: skip
        return Recipe((add, finish), (sums,))


# Predictions are for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB,
# 145 us with stored places.
ATOMICS = Atomics(
    "atomics",
    "one thread per output adds to the pixel of its maximum; not deterministic where windows overlap",
    None,
    None,
)


@dataclass(frozen=True)
class PerPixel(ThreadsRung[MaxPool2dBackwardProblem]):
    """One thread per input, with x or with stored places."""

    stored: bool

    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        if problem.stored == self.stored:
            return None
        if self.stored:
            return f"{self.name} needs stored places, but {problem.name} has x"
        return f"{self.name} reads x, but {problem.name} has stored places"

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        buffers = (Buffer("gradient"), Buffer("places" if self.stored else "x"), Buffer("y"))
        return Recipe((call(problem, self.name, buffers, problem.forward.elements, config.threads),))


GATHERED = PerPixel(
    "gathered",
    "one thread per input recomputes the maxima of its windows and sums its own gradients in a fixed order",
    below="atomics",
    # 205 million threads of 400 instructions (2.9 ms), since each maximum is found nine times, against 51 million of
    # 250 with an addition in L2 each (0.5 ms), and 1.4 GB more of sums (0.5 ms). What it buys is determinism.
    predicted_gain=0.4,
    stored=False,
)


class Rows(ThreadsRung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return side_by_side_refusal(self.name, problem.forward)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        buffers = (Buffer("gradient"), X, PLACES, Buffer("y"))
        source = "max_pool2d_backward/rows.cu"
        return side_by_side_recipe(source, problem.forward, buffers, config.threads, backward=problem)


# Predicted for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 302 MB, 71 us; 185 MB, 43 us with
# stored places.
ROWS = Rows(
    "rows",
    "up to 16 bytes of a row per thread, for non-overlapping windows in NCHW",
    below=("gathered", "stored"),
    # 67 million threads of 150 instructions (350 us) against 50 us: 10% above the DRAM bound.
    predicted_gain=7.0,
)


# --- rung shared_sums: windows add to the sums of a tile of pixels in shared memory


@dataclass(frozen=True)
class SumsConfig(Config):
    rows: int
    columns: int
    """Pixels per CTA."""
    threads: int = 128

    def tiles(self, problem: MaxPool2dBackwardProblem) -> tuple[int, int]:
        f = problem.forward
        return blocks(f.height, self.rows), blocks(f.width, self.columns)

    def grid(self, problem: MaxPool2dBackwardProblem) -> int:
        rows, columns = self.tiles(problem)
        return max(1, problem.forward.batch * problem.forward.channels * rows * columns)


_TILES = tuple(
    SumsConfig(rows, columns) for rows, columns in ((16, 32), (32, 32), (8, 32), (16, 64), (8, 16))
)


class SharedSums(Rung[MaxPool2dBackwardProblem, SumsConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if max(tile.grid(problem) for tile in _TILES) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; {problem.name} needs more"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[SumsConfig, ...]:
        """Order by pixels covered, including those outside the image."""
        return tuple(sorted(_TILES, key=lambda tile: tile.grid(problem) * tile.rows * tile.columns))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: SumsConfig) -> Recipe:
        f = problem.forward
        return launch(
            Program.of("max_pool2d_backward/shared_sums.cu", problem=f, backward=problem, config=config),
            config.grid(problem),
            config.threads,
            Buffer("gradient"), X, PLACES, Buffer("y"), pooling.shape(f), windows(f), *config.tiles(problem),
        )  # fmt: skip


SHARED_SUMS = SharedSums(
    "shared_sums",
    "windows add to a tile of pixels in shared memory, and each pixel is written once; not deterministic where windows "
    "overlap",
    below="atomics",
    # fp32 sums, 822 MB, are added to, read, and zeroed: 2.9 GB against 0.9.
    predicted_gain=2.5,
)


STORED = PerPixel(
    "stored",
    "one thread per input sums the gradients of windows whose stored place is its own, in a fixed order",
    below="atomics",
    # 205 million threads of 150 instructions (1.1 ms) against an addition in L2 for each of 51 million outputs, and
    # 1.4 GB of sums (0.7 ms).
    predicted_gain=0.7,
    stored=True,
)


# --- rung vectorised: 16 bytes of channels per thread, for a tile of pixels


MOST_WINDOWS = 9
"""Most windows that reach into a tile: gradient and places of each take up to six registers."""
MOST_PIXELS = 64
"""Most pixels per tile, since the kernel unrolls them."""
MOST_TAPS = 81
"""Most taps of all windows of a tile if read from x, since the kernel unrolls them."""


@dataclass(frozen=True)
class TileConfig(Config):
    rows: int
    columns: int
    """Windows that begin in a tile."""
    threads: int = 128

    def windows(self, f: MaxPool2dProblem) -> int:
        """Return the windows that reach into a tile."""
        down, along = ((kernel - 1) // stride for kernel, stride in zip(f.kernel, f.stride, strict=True))
        return (self.rows + down) * (self.columns + along)

    def pixels(self, f: MaxPool2dProblem) -> tuple[int, int]:
        return self.rows * f.stride[0], self.columns * f.stride[1]

    def tiles(self, f: MaxPool2dProblem) -> tuple[int, int]:
        """Return the tiles over the image including its top and left padding."""
        rows, columns = self.pixels(f)
        return ceil_div(f.height + f.padding[0], rows), ceil_div(f.width + f.padding[1], columns)

    def threads_for(self, f: MaxPool2dProblem) -> int:
        down, along = self.tiles(f)
        return f.batch * down * along * (f.channels // widest_vector(f.dtype, f.channels))

    def fits(self, problem: MaxPool2dBackwardProblem) -> bool:
        f = problem.forward
        rows, columns = self.pixels(f)
        windows = self.windows(f)
        taps = 0 if problem.stored else windows * f.kernel[0] * f.kernel[1]
        return windows <= MOST_WINDOWS and rows * columns <= MOST_PIXELS and taps <= MOST_TAPS


TILES = tuple(TileConfig(rows, columns) for rows, columns in ((1, 1), (1, 2), (2, 2)))


class Vectorized(Rung[MaxPool2dBackwardProblem, TileConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {f.layout}"
        if f.dilation != (1, 1):
            return f"{self.name} needs windows without dilation, not {spell_pair(f.dilation)}"
        if not TILES[0].fits(problem):
            return (
                f"{self.name} supports up to {MOST_WINDOWS} windows per pixel, strides of up to {MOST_PIXELS} pixels, "
                f"and {MOST_TAPS} taps if it reads x"
            )
        if TILES[0].threads_for(f) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[TileConfig, ...]:
        """Smallest first: the registers of more windows cost more occupancy than overlaps save loads."""
        return tuple(tile for tile in TILES if tile.fits(problem))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: TileConfig) -> Recipe:
        f = problem.forward
        vector = widest_vector(f.dtype, f.channels)
        program = Program.of(
            "max_pool2d_backward/vectorised.cu", problem=f, backward=problem, config=config, vector=vector
        )
        return launch(
            program,
            blocks(config.threads_for(f), config.threads),
            config.threads,
            Buffer("gradient"), X, PLACES, Buffer("y"), pooling.shape(f), *config.tiles(f),
        )  # fmt: skip


VECTORISED = Vectorized(
    "vectorised",
    "16 bytes of channels per thread, for a tile of pixels whose windows are examined once",
    below=("gathered", "stored"),
    # With stored places 160 us, 10% above the DRAM bound, against 1.1 ms. From x the comparisons of two windows per
    # pixel, 300 us, against 2.9 ms.
    predicted_gain=7.0,
)


# --- the reference


def random_inputs(problem: MaxPool2dBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """`indices` are those that PyTorch's forward pass saves; only the peer reads them."""
    f = problem.forward
    x = pooling.random_inputs(f, draw)["x"]
    indices = indices_of(f, x)
    kept = {"places": to_places(f, indices)} if problem.stored else {"x": x}
    return {"gradient": pooling.random_gradient(problem, draw.next), **kept, "indices": indices}


def from_places(
    places: torch.Tensor,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat image indices of places, and which are valid; invalid ones have index 0."""
    top, left = corners(places, stride, padding)
    counts = places != NOWHERE
    taps = places.long()
    rows = top + taps.div(kernel[1], rounding_mode="floor") * dilation[0]
    columns = left + taps % kernel[1] * dilation[1]
    return torch.where(counts, rows * width + columns, 0), counts


def exact(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    f, gradient = problem.forward, inputs["gradient"].double()
    if problem.stored:
        pixels, counts = from_places(inputs["places"], f.width, f.kernel, f.stride, f.padding, f.dilation)
        planes = gradient.new_zeros(f.batch, f.channels, f.pixels)
        planes.scatter_add_(2, pixels.flatten(2), torch.where(counts, gradient, 0.0).flatten(2))
        return planes.view(f.batch, f.channels, f.height, f.width)
    x = inputs["x"].double()
    return _finish(problem, _backward(f, gradient, x, indices_of(f, x)), x)


def peer(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch from the indices of its forward pass, then the ReLU's backward. On a CPU, which sums in 16 bits, it is
    given fp32 tensors."""
    gradient = inputs["gradient"]
    wide = gradient if gradient.is_cuda else gradient.float()
    f = problem.forward
    x = inputs.get("x")
    if x is None:  # PyTorch reads only its shape and layout
        x = torch.empty(
            (f.batch, f.channels, f.height, f.width),
            dtype=wide.dtype, device=wide.device, memory_format=MEMORY_FORMAT[problem.layout],
        )  # fmt: skip
    x = x.to(wide.dtype)
    return _finish(problem, _backward(f, wide, x, inputs["indices"]), x).to(gradient.dtype)


def _backward(
    f: MaxPool2dProblem, gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
    result: torch.Tensor = backward(
        gradient, x, f.kernel, f.stride, f.padding, f.dilation, f.ceil_mode, indices
    )
    return result


def _finish(problem: MaxPool2dBackwardProblem, dx: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(dx, x, 0) if problem.mask else dx


# --- the operation


class MaxPool2dBackwardOperation(Operation[MaxPool2dBackwardProblem]):
    name = "max_pool2d_backward"
    problem = MaxPool2dBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("max_pool2d_backward", (ATOMICS, SHARED_SUMS, GATHERED, STORED, ROWS, VECTORISED))
    problems = tuple(
        MaxPool2dBackwardProblem.parse(name)
        for name in (
            "64_112_k3s2p1_b256",
            "64_112_k3s2p1_b256_stored",
            "256_32_k2s2_b256_mask",
            "256_32_k2s2_b256_stored",
        )
    )
    """Problems of `escalade ladder`: ResNet's overlapping windows, and an autoencoder's behind a ReLU."""
    small_problems = tuple(
        MaxPool2dBackwardProblem.parse(name)
        for name in (
            "16_13_k3s2p1_b2",
            "16_13_k3s2p1_b2_stored",
            "8_10_k2s2_b1_mask",
            "8_10_k2s2_b2_stored",
            "3_9x16_k2s2_b2",
            "2_7x8_k2x1s3x2_b1_stored",
            "12_9_k3s1p1_b1_mask",
            "3_11_k3s2_b2_ceil",
            "5_6_k2s3p1_b1_ceil_stored",
            "24_7x17_k3x5s2x3p1x2_b1",
            "6_9x8_k3x2s2x1p1d2x3_b1_mask",
            "6_9x8_k3x2s2x1p1d2x3_b1_stored",
            "8_20_k16s4p8_b1",
            "1_1_k1s1_b1",
        )
    )
    """Small problems: windows that overlap, touch and leave gaps, both roundings, kernels that are rectangular or have
    more pixels than a byte counts, dilation, and x or stored places."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "rows", "stored", "gathered")
    """`atomics` and `shared_sums` are excluded because they are not deterministic."""


MAX_POOL2D_BACKWARD = MaxPool2dBackwardOperation()


# --- the PyTorch operator


_NAME = "max_pool2d_backward"


def max_pool2d_backward(
    gradient: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    x: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    size: int | Sequence[int] | None = None,
    ceil_mode: bool = False,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """Gradient of x in y = max_pool2d(x, kernel, stride, padding), from that of y.

    Pass either x, or `places` with the `size` of x: the position of each maximum in its window, row-major, in one byte,
    and 255 for outputs without gradient. As in PyTorch, the first of equal maxima counts, and the last of NaNs. With
    `mask` (x is the output of a ReLU) the result is the gradient of the ReLU's input: zero where x is not positive. The
    result has the gradient's layout unless `channels_last` is given, and is deterministic except with the rungs
    `atomics` and `shared_sums`. `rung` names a rung of the ladder instead of the chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    if size is None:
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{_NAME} needs x, or places and the size of x")
        size = x.shape[2:]
    return OPERATOR(
        gradient, x, places, pooling.as_pair(size, "size"), kernel, stride, pooling.as_pair(padding, "padding"),
        ceil_mode, mask, channels_last, rung,
    )  # fmt: skip


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    places: torch.Tensor | None,
    size: SymPair,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> CallPlan:
    if (x is None) == (places is None):
        raise UnsupportedError(f"{_NAME} needs either x or places, not both or neither")
    if places is not None and mask:
        raise UnsupportedError("mask and places: places already mark clipped maxima; drop mask")

    def problem() -> MaxPool2dBackwardProblem:
        f = MaxPool2dProblem(
            *shape_of(gradient)[:2], *size, kernel, stride, padding, ceil_mode,
            *pooling.backward_form(gradient, channels_last),
        )  # fmt: skip
        pooling.check_gradients(f, {"x": x}, gradient=gradient, places=places)
        return MaxPool2dBackwardProblem(f, mask=mask, stored=places is not None)

    return CallPlan(
        MAX_POOL2D_BACKWARD, lambda: pooling.empty_gradient(gradient, size, channels_last), problem
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, x, places, _, *ctx.windows, ctx.mask, _, _ = inputs
    ctx.save_for_backward(x, places)


def _backward_op(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """dx is linear in dy, so the gradient of dy is gathered from the pixels of the maxima."""
    x, places = ctx.saved_tensors
    kernel, stride, padding, ceil_mode = ctx.windows
    if places is None:
        if ctx.mask:
            gradient = torch.ops.aten.threshold_backward(gradient, x, 0)
        _, pixels = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, [1, 1], ceil_mode)
        counts = None
    else:
        pixels, counts = from_places(places, gradient.shape[3], kernel, stride, padding)
    taken = gradient.flatten(2).gather(2, pixels.flatten(2)).view_as(pixels)
    return (taken if counts is None else torch.where(counts, taken, 0)), *(None,) * 10


OPERATOR = define_planned(
    _NAME,
    _plan,
    "gradient: N C P Q, x: N C H W, places: N C P Q of uint8",
    setup=_setup,
    backward=_backward_op,
)
