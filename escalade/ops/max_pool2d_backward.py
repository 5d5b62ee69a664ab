"""A maximum's gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of, element, widest_vector
from escalade.ops.base.gradient_problem import GradientProblem
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.max_pool2d import (
    NOWHERE,
    MaxPool2dProblem,
    corners,
    indices_of,
    require_bytes_for_places,
    to_places,
    windows,
)
from escalade.ops.shared import pooling, side_by_side, windowed
from escalade.ops.shared.images import LAYOUTS, MEMORY_FORMAT
from escalade.ops.shared.pooling import empty_input as empty_output
from escalade.ops.shared.windowed import windows_per_pixel

# --- the problem


_MASK, _STORED = "_mask", "_stored"


@dataclass(frozen=True)
class MaxPool2dBackwardProblem(GradientProblem[MaxPool2dProblem]):
    """dx of y = max_pool2d(x), from `gradient`, which is that of y, and x; the result is buffer `y`.

    An output's gradient goes to the pixel that its maximum comes from: the first of equals, the last of NaNs. With
    `mask`, where x came out of a ReLU, the result is the gradient of what went into the ReLU: none where x is not
    positive. With `stored`, buffer `places` is there instead of x: for each output the place of its maximum in the
    window, row by row, in one byte, or 255 where a ReLU has cut it off.
    """

    mask: bool = False
    stored: bool = False

    def __post_init__(self) -> None:
        self.follow("max_pool2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch or f.places:
            raise UnsupportedError(
                f"{f.name} has pixels that lie apart, or a second result; max_pool2d_backward takes the pool's windows "
                "and dense images"
            )
        if self.mask and self.stored:
            raise UnsupportedError(
                f"{f.name} with a mask and stored places: the places say themselves where a ReLU has cut a maximum off"
            )
        if self.stored:
            require_bytes_for_places(f.kernel)

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> MaxPool2dBackwardProblem:
        """The problem of a name such as `64_112_k3s2p1_b256_mask`: the pool's, then _mask behind a ReLU, or _stored."""
        pool = name.removesuffix(_STORED).removesuffix(_MASK)
        return MaxPool2dBackwardProblem(
            MaxPool2dProblem.parse(pool, dtype, layout), mask=_MASK in name, stored=name.endswith(_STORED)
        )

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
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
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk. Where windows do
        not overlap, nothing is computed."""
        terms = windows_per_pixel(self.forward)
        return 2.0**-24 * math.sqrt(1 + terms / 6) if terms > 1 else 0.0


# --- rungs, arguments: how max_pool2d_backward reaches the kernels with one thread an element: what its rungs share


def kernel_constants(problem: MaxPool2dBackwardProblem) -> dict[str, Constant]:
    return {**pooling.constants(problem.forward), "MASK": problem.mask, "STORED": problem.stored}


def call(
    problem: MaxPool2dBackwardProblem, rung: str, buffers: tuple[Buffer, ...], elements: int, threads: int
) -> KernelCall:
    """The launch of a rung's kernel, one thread an element."""
    layout: dict[str, Constant] = {"NHWC": problem.layout == "nhwc"}
    arguments: tuple[Argument, ...] = (*buffers, pooling.shape(problem.forward), windows(problem.forward))
    return KernelCall(
        Program.of(
            f"max_pool2d_backward/{rung}.cu",
            f"max_pool2d_backward_{rung}",
            kernel_constants(problem) | layout,
        ),
        (blocks(elements, threads), 1, 1),
        (threads, 1, 1),
        arguments,
        overlap=True,
    )


# --- rungs, atomics: one thread per output, which adds to where its maximum comes from


_FP32_BYTES = 4


class Atomics(Rung[MaxPool2dBackwardProblem, ThreadsConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        forward, threads = problem.forward, config.threads
        sums = Workspace("sums", max(1, forward.elements) * _FP32_BYTES, zeroed=True)
        buffers = (
            Buffer("gradient"), Buffer("x", optional=True), Buffer("places", optional=True), Buffer("sums"),
        )  # fmt: skip
        finish = KernelCall(
            Program.of(
                "max_pool2d_backward/atomics_finish.cu", "max_pool2d_backward_atomics_finish",
                {"Element": element(problem.dtype)},
            ),
            (blocks(forward.elements, threads), 1, 1),
            (threads, 1, 1),
            (Buffer("sums"), Buffer("y"), Int64(forward.elements)),
            overlap=True,
        )  # fmt: skip
        add = call(problem, self.name, buffers, forward.output_elements, threads)
        return Recipe((add, finish), (sums,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB, 145 us
# by stored places.
ATOMICS = Atomics(
    "atomics",
    "one thread an output adds to the pixel of its maximum; where windows overlap, not the same bits in every run",
    None,
    None,
)


# --- rungs, gathered: one thread per input, which finds the maxima of its windows again


class Gathered(Rung[MaxPool2dBackwardProblem, ThreadsConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return (
            f"{self.name} reads x, and {problem.name} has stored places instead" if problem.stored else None
        )

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        buffers = (Buffer("gradient"), Buffer("x"), Buffer("y"))
        return Recipe((call(problem, self.name, buffers, problem.forward.elements, config.threads),))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us.
GATHERED = Gathered(
    "gathered",
    "one thread an input finds the maxima of its windows again and adds up what is its own, in a fixed order",
    below="atomics",
    # 205 million threads of 400 instructions (2.9 ms), for each maximum is found nine times, against 51 million of 250
    # with an addition in L2 each (0.5 ms), and 1.4 GB more of sums (0.5 ms): what it buys is the same bits every time.
    predicted_gain=0.4,
)


# --- rungs, rows: up to sixteen bytes of a row a thread, for windows side by side in NCHW


class Rows(Rung[MaxPool2dBackwardProblem, ThreadsConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return side_by_side.refusal(self.name, problem.forward)

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        found = Buffer("x", optional=True), Buffer("places", optional=True)
        buffers = (Buffer("gradient"), *found, Buffer("y"))
        source = "max_pool2d_backward/rows.cu"
        return side_by_side.recipe(
            source, problem.forward, kernel_constants(problem), buffers, config.threads
        )


# Predictions for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 302 MB, 71 us; 185 MB, 43 us by
# stored places.
ROWS = Rows(
    "rows",
    "up to 16 bytes of a row a thread, for windows side by side in NCHW",
    below=("gathered", "stored"),
    # 67 million threads of 150 instructions (350 us) against 50 us: a tenth more than the rate of memory.
    predicted_gain=7.0,
)


# --- rungs, shared_sums: the sums of a tile of pixels in shared memory, to which windows add


@dataclass(frozen=True)
class SumsConfig(Config):
    rows: int
    columns: int
    """Pixels of a tile."""
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
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if max(tile.grid(problem) for tile in _TILES) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[SumsConfig, ...]:
        """The least pixels of tiles first, those outside the image among them."""
        return tuple(sorted(_TILES, key=lambda tile: tile.grid(problem) * tile.rows * tile.columns))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: SumsConfig) -> Recipe:
        tile: dict[str, Constant] = {"TILE_ROWS": config.rows, "TILE_COLUMNS": config.columns}
        found = Buffer("x", optional=True), Buffer("places", optional=True)
        f = problem.forward
        call = KernelCall(
            Program.of(
                "max_pool2d_backward/shared_sums.cu",
                "max_pool2d_backward_shared_sums",
                kernel_constants(problem) | tile,
            ),
            (config.grid(problem), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), *found, Buffer("y"), pooling.shape(f), windows(f), *config.tiles(problem)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB, 145 us
# by stored places.
SHARED_SUMS = SharedSums(
    "shared_sums",
    "the sums of a tile of pixels in shared memory, to which windows add: each pixel is written once; where windows "
    "overlap, not the same bits in every run",
    below="atomics",
    # Sums of 32 bits, 822 MB, are added to, read, and left at zero: 2.9 GB against 0.9.
    predicted_gain=2.5,
)


# --- rungs, stored: one thread per input, by the places that the forward pass has stored


class Stored(Rung[MaxPool2dBackwardProblem, ThreadsConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return (
            None if problem.stored else f"{self.name} takes stored places, and {problem.name} has x instead"
        )

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: ThreadsConfig) -> Recipe:
        buffers = (Buffer("gradient"), Buffer("places"), Buffer("y"))
        return Recipe((call(problem, self.name, buffers, problem.forward.elements, config.threads),))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 617 MB, 145 us.
STORED = Stored(
    "stored",
    "one thread an input adds up the gradients of windows whose stored place is its own, in a fixed order",
    below="atomics",
    # 205 million threads of 150 instructions (1.1 ms) against an addition in L2 for each of 51 million outputs, and
    # 1.4 GB of sums (0.7 ms).
    predicted_gain=0.7,
)


# --- rungs, vectorised: sixteen bytes of channels a thread, for a tile of pixels


MOST_WINDOWS = 9
"""Windows that reach into a tile: the gradient and the places of each take up to six registers."""
MOST_PIXELS = 64
"""Pixels of a tile: the code has no loop over them."""
MOST_TAPS = 81
"""Taps of all windows of a tile that are found in x: the code has no loop over them."""


@dataclass(frozen=True)
class TileConfig(Config):
    rows: int
    columns: int
    """Windows that begin in a tile."""
    threads: int = 128

    def windows(self, f: MaxPool2dProblem) -> int:
        """Windows that begin in a tile, or in front of it and reach into it."""
        down, along = ((kernel - 1) // stride for kernel, stride in zip(f.kernel, f.stride, strict=True))
        return (self.rows + down) * (self.columns + along)

    def pixels(self, f: MaxPool2dProblem) -> tuple[int, int]:
        return self.rows * f.stride[0], self.columns * f.stride[1]

    def tiles(self, f: MaxPool2dProblem) -> tuple[int, int]:
        """Tiles down and along the image with the padding in front of it."""
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


class Vectorised(Rung[MaxPool2dBackwardProblem, TileConfig]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.dilation != (1, 1):
            return f"{self.name} takes windows without gaps, not dilation {spell_pair(f.dilation)}"
        if not TILES[0].fits(problem):
            return (
                f"{self.name} takes up to {MOST_WINDOWS} windows that see a pixel, strides of up to {MOST_PIXELS} "
                f"pixels, and where it reads x {MOST_TAPS} taps"
            )
        if TILES[0].threads_for(f) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[TileConfig, ...]:
        """The smallest first: registers for more windows cost more threads than overlaps save loads."""
        return tuple(tile for tile in TILES if tile.fits(problem))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: TileConfig) -> Recipe:
        f = problem.forward
        tile = {
            "VECTOR": widest_vector(f.dtype, f.channels),
            "TILE_ROWS": config.rows,
            "TILE_COLUMNS": config.columns,
        }
        call = KernelCall(
            Program.of(
                "max_pool2d_backward/vectorised.cu", "max_pool2d_backward_vectorised",
                windowed.constants(f) | kernel_constants(problem) | tile,
            ),
            (blocks(config.threads_for(f), config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("gradient"), Buffer("x", optional=True), Buffer("places", optional=True), Buffer("y"),
                pooling.shape(f), *config.tiles(f),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB, 145 us
# by stored places.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a tile of pixels whose windows are looked at once",
    below=("gathered", "stored"),
    # By stored places 160 us, a tenth more than the rate of memory, against 1.1 ms. In x the comparisons of two windows
    # a pixel, 300 us, against 2.9 ms.
    predicted_gain=7.0,
)


# --- problems to measure and to test


PROBLEMS = tuple(
    MaxPool2dBackwardProblem.parse(name)
    for name in (
        "64_112_k3s2p1_b256",
        "64_112_k3s2p1_b256_stored",
        "256_32_k2s2_b256_mask",
        "256_32_k2s2_b256_stored",
    )
)
"""What `escalade ladder max_pool2d_backward` measures: ResNet's, whose windows overlap, and an autoencoder's, behind a
ReLU."""

SMALL_PROBLEMS = tuple(
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
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, kernels that are
not square or have more pixels than a byte counts, gaps inside of windows, and x or stored places."""


# --- the reference


Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: MaxPool2dBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """`indices` are what PyTorch's forward pass keeps; only the peer reads them."""
    f = problem.forward
    x = pooling.random_inputs(f, device, seed)["x"]
    indices = indices_of(f, x)
    kept = {"places": to_places(f, indices)} if problem.stored else {"x": x}
    return {"gradient": pooling.random_gradient(problem, device, seed + 1), **kept, "indices": indices}


def from_places(
    places: torch.Tensor,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in the image of places in the window, and which of them count; the others are some pixel."""
    top, left = corners(places, stride, padding)
    counts = places != NOWHERE
    taps = places.long()
    rows = top + taps.div(kernel[1], rounding_mode="floor") * dilation[0]
    columns = left + taps % kernel[1] * dilation[1]
    return torch.where(counts, rows * width + columns, 0), counts


def exact(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in float64."""
    f, gradient = problem.forward, inputs["gradient"].double()
    if problem.stored:
        pixels, counts = from_places(inputs["places"], f.width, f.kernel, f.stride, f.padding, f.dilation)
        planes = gradient.new_zeros(f.batch, f.channels, f.pixels)
        planes.scatter_add_(2, pixels.flatten(2), torch.where(counts, gradient, 0.0).flatten(2))
        return planes.view(f.batch, f.channels, f.height, f.width)
    x = inputs["x"].double()
    return _finish(problem, _backward(f, gradient, x, indices_of(f, x)), x)


def peer(problem: MaxPool2dBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch in the problem's dtype, by the indices that its forward pass keeps, then the ReLU's backward pass; on a
    CPU, which sums in 16 bits, of fp32 tensors."""
    gradient = inputs["gradient"]
    wide = gradient if gradient.is_cuda else gradient.float()
    f = problem.forward
    x = inputs.get("x")
    if x is None:  # only its shape and layout count
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


class MaxPool2dBackward(Operation[MaxPool2dBackwardProblem]):
    name = "max_pool2d_backward"
    problem = MaxPool2dBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("max_pool2d_backward", (ATOMICS, SHARED_SUMS, GATHERED, STORED, ROWS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: MaxPool2dBackwardProblem) -> tuple[str, ...]:
        """Never `atomics` and `shared_sums`: their results are not the same bits every time."""
        return ("vectorised", "rows", "stored", "gathered")


MAX_POOL2D_BACKWARD = MaxPool2dBackward()


# --- the PyTorch operator


_NAME = "max_pool2d_backward"
_SCHEMA = (
    f"{_NAME}(Tensor gradient, Tensor? x, Tensor? places, SymInt[2] size, int[2] kernel, int[2] stride, "
    "int[2] padding, bool ceil_mode, bool mask=False, bool? channels_last=None, str? rung=None) -> Tensor"
)


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
    """The gradient of x in y = max_pool2d(x, kernel, stride, padding), from that of y.

    Either x is given, or `places` with the `size` of x: for each output the place of its maximum in the window, row by
    row, in one byte, and 255 where no gradient goes. The first of equal maxima counts, and the last of NaNs, as in
    PyTorch. With `mask`, where x came out of a ReLU, the result is that of what went into the ReLU: zero where x is not
    positive. The result has the gradient's layout unless `channels_last` says which, and is the same bits every time
    except by the rung `atomics`. `rung` names one rung of the ladder instead of the chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    if size is None:
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{_NAME} takes x, or places and the size of x")
        size = x.shape[2:]
    return OPERATOR(
        gradient, x, places, pooling.as_pair(size, "size"), kernel, stride, pooling.as_pair(padding, "padding"),
        ceil_mode, mask, channels_last, rung,
    )  # fmt: skip


def _check(gradient: torch.Tensor, x: torch.Tensor | None, places: torch.Tensor | None, mask: bool) -> None:
    """What can be said without the sizes, which may be symbols while a program is traced."""
    pooling.check_gradient(_NAME, gradient, x=x, places=places)
    if (x is None) == (places is None):
        raise UnsupportedError(f"{_NAME} takes x, or the places of the maxima: one of the two")
    if x is not None and x.dtype != gradient.dtype:
        raise UnsupportedError(f"gradient is {gradient.dtype} but x {x.dtype}; convert them to one dtype")
    if places is not None and places.dtype != torch.uint8:
        raise UnsupportedError(f"places are {places.dtype}; {_NAME} takes one byte for each, torch.uint8")
    if places is not None and mask:
        raise UnsupportedError(
            "a mask and places: the places say themselves where a ReLU has cut a maximum off"
        )


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    places: torch.Tensor | None,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> CallPlan:
    _check(gradient, x, places, mask)
    f = MaxPool2dProblem(
        gradient.shape[0], gradient.shape[1], size[0], size[-1], (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of(_NAME, gradient),
        pooling.backward_layout(gradient, channels_last),
    )  # fmt: skip
    problem = MaxPool2dBackwardProblem(f, mask=mask, stored=places is not None)
    outputs = (f.batch, f.channels, f.output_height, f.output_width)
    tensors = {"gradient": gradient, "x": x, "places": places}
    sizes = {"gradient": outputs, "x": (f.batch, f.channels, f.height, f.width), "places": outputs}
    return pooling.plan_backward(MAX_POOL2D_BACKWARD, problem, tensors, sizes, rung)


def _fake(
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    places: torch.Tensor | None,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    _check(gradient, x, places, mask)
    return pooling.empty_gradient(gradient, size, channels_last)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, x, places, _, *ctx.windows, ctx.mask, _, _ = inputs
    ctx.save_for_backward(x, places)


def _backward_op(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """The result is linear in the gradient of y: what is asked of dx is taken from where each maximum comes from."""
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


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward_op)
