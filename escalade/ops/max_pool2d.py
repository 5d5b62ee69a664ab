"""The maximum over windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import NamePattern, spell_pair
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling, window_runs, windowed
from escalade.ops.shared.images import LAYOUTS, MEMORY_FORMAT, check_images, layout_of
from escalade.ops.shared.pooling import empty_output, random_inputs
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows, empty_pooled

# --- the problem


NOWHERE = 255
"""What is stored in place of a maximum that a ReLU in front of the pool has cut off."""


@dataclass(frozen=True)
class MaxPool2dProblem(WindowedImages):
    """y[oh, ow] = max of x over the window of `kernel` pixels at (oh, ow) * stride - padding.

    What the padding adds is less than every number. The pixels of a window are `dilation` apart. With `places` the
    result has a second part, buffer `places`, which the gradient is found by: for each output the place of its maximum
    in the window, row by row, in one byte; the first of equals, the last of NaNs. With `behind_relu`, where x came out
    of a ReLU, it is 255 for maxima that are not positive, through which no gradient goes.
    """

    NAME: ClassVar = NamePattern(
        "pooling",
        WINDOWS + "[d{dilation}]_b{batch}{ceil_mode?_ceil}[_{kept:places|behindrelu}]",
        {"kept": ""},
    )

    dilation: tuple[int, int] = (1, 1)
    places: bool = False
    behind_relu: bool = False

    def __post_init__(self) -> None:
        check_windows("max_pool2d", self)
        if self.behind_relu and not self.places:
            raise UnsupportedError(
                f"{self.name}: behind a ReLU only the places differ, which are not asked for"
            )
        if self.places:
            require_bytes_for_places(self.kernel)

    @property
    def kept(self) -> str:
        """What the name says of `places` and `behind_relu`."""
        return "behindrelu" if self.behind_relu else "places" if self.places else ""

    @classmethod
    def _fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        kept = values.pop("kept")
        return values | {"places": kept != "", "behind_relu": kept == "behindrelu"}

    @property
    def dilations(self) -> tuple[int, int]:
        return self.dilation

    @property
    def bytes(self) -> int:
        return super().bytes + (self.output_elements if self.places else 0)

    @property
    def rounding(self) -> float:
        """Nothing is computed: a maximum is one of the inputs."""
        return 0.0


def require_bytes_for_places(kernel: tuple[int, int]) -> None:
    """Refuses windows with more pixels than one byte tells apart."""
    if kernel[0] * kernel[1] > NOWHERE:
        raise UnsupportedError(
            f"a kernel of {spell_pair(kernel)}: a place is stored in a byte, which takes windows of up to {NOWHERE} "
            "pixels"
        )


# --- rungs, naive: one thread per output


def windows(problem: MaxPool2dProblem) -> Ints:
    """`Windows` of kernels/max_pool2d/windows.cuh."""
    p = problem
    return Ints((*p.kernel, *p.stride, *p.padding, *p.dilation))


def kept(problem: MaxPool2dProblem) -> dict[str, Constant]:
    """What kernels that can tell the places of maxima leave open."""
    return {"PLACES": problem.places, "BEHIND_RELU": problem.behind_relu}


class Naive(Rung[MaxPool2dProblem, ThreadsConfig]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: MaxPool2dProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        layout: dict[str, Constant] = {"NHWC": p.layout == "nhwc"}
        constants = pooling.constants(p) | layout | kept(p)
        call = KernelCall(
            Program.of("max_pool2d/naive.cu", "max_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), Buffer("places", optional=True), pooling.shape(p), windows(p)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
NAIVE = Naive("naive", "one thread an output, every window read from global memory", None, None)


# --- rungs, row_packs: sixteen bytes of a row a thread, for a run of outputs in several rows


class RowPacks(window_runs.RowPacks[MaxPool2dProblem]):
    source = "max_pool2d/row_packs.cu"

    def constants(self, problem: MaxPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | kept(problem)

    def operands(self) -> tuple[Argument, ...]:
        return (Buffer("places", optional=True),)


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
ROW_PACKS = RowPacks(
    "row_packs",
    "16 bytes of a row a thread, for a run of outputs in two rows",
    below="shared_tile",
    # 51 million outputs, of which a thread takes eight: 6 million threads of 150 instructions, near the rate of memory,
    # against 175 us.
    predicted_gain=1.4,
)


# --- rungs, shared_tile: what a tile of windows sees, in shared memory


_STATIC_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class TileConfig(Config):
    rows: int
    columns: int

    def shared_bytes(self, problem: MaxPool2dProblem) -> int:
        p = problem
        rows = (self.rows - 1) * p.stride[0] + p.kernel[0]
        return rows * ((self.columns - 1) * p.stride[1] + p.kernel[1]) * ELEMENT_BYTES[p.dtype]

    def tiles(self, problem: MaxPool2dProblem) -> tuple[int, int]:
        return blocks(problem.output_height, self.rows), blocks(problem.output_width, self.columns)


_TILES = tuple(
    TileConfig(rows, columns)
    for rows, columns in ((8, 32), (4, 64), (16, 16), (8, 16), (4, 32), (8, 8), (4, 16), (4, 8), (2, 32))
)


class SharedTile(Rung[MaxPool2dProblem, TileConfig]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if problem.dilation != (1, 1):
            return f"{self.name} takes windows without gaps, not dilation {spell_pair(problem.dilation)}"
        if problem.places:
            return f"{self.name} gives the maxima alone, not their places"
        if not self.configs(problem):
            return (
                f"{self.name} keeps what a tile of windows sees in 48 KB of shared memory, which these exceed"
            )
        if self._blocks(problem, _TILES[-2]) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: MaxPool2dProblem) -> tuple[TileConfig, ...]:
        """Least waste at the edges first, then the least read twice."""
        fitting = [tile for tile in _TILES if tile.shared_bytes(problem) <= _STATIC_SHARED_BYTES]

        def cost(tile: TileConfig) -> float:
            rows, columns = tile.tiles(problem)
            return rows * columns * (tile.rows * tile.columns + tile.shared_bytes(problem))

        return tuple(sorted(fitting, key=cost))

    def recipe(self, problem: MaxPool2dProblem, config: TileConfig) -> Recipe:
        constants = windowed.constants(problem) | {"TILE_ROWS": config.rows, "TILE_COLUMNS": config.columns}
        call = KernelCall(
            Program.of("max_pool2d/shared_tile.cu", "max_pool2d_shared_tile", constants),
            (self._blocks(problem, config), 1, 1),
            (config.rows * config.columns, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem), *config.tiles(problem)),
            overlap=True,
        )
        return Recipe((call,))

    def _blocks(self, problem: MaxPool2dProblem, tile: TileConfig) -> int:
        rows, columns = tile.tiles(problem)
        return max(1, problem.batch * problem.channels * rows * columns)


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
SHARED_TILE = SharedTile(
    "shared_tile",
    "what a tile of windows sees is brought into shared memory once, edges included",
    below="naive",
    # 51 million threads of 100 instructions (175 us) instead of 220 (380 us).
    predicted_gain=2.0,
)


# --- rungs, vectorised: sixteen bytes of channels a thread, for a run of outputs


class Vectorised(window_runs.ChannelPacks[MaxPool2dProblem]):
    source = "max_pool2d/vectorised.cu"

    def constants(self, problem: MaxPool2dProblem) -> dict[str, Constant]:
        return windowed.constants(problem) | kept(problem)

    def operands(self) -> tuple[Argument, ...]:
        return (Buffer("places", optional=True),)


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # At the rate of memory, 121 us, against 380 us.
    predicted_gain=3.0,
)


# --- problems to measure and to test


def _square(
    channels: int, size: int, kernel: int, stride: int, padding: int, batch: int = 1, ceil: bool = False
) -> MaxPool2dProblem:
    return MaxPool2dProblem(
        batch, channels, size, size, (kernel, kernel), (stride, stride), (padding, padding), ceil
    )


PROBLEMS = (
    *(_square(64, 112, 3, 2, 1, batch) for batch in (1, 32, 256)),
    MaxPool2dProblem.parse("256_32_k2s2_b256_behindrelu"),
)
"""What `escalade ladder max_pool2d` measures: ResNet's, in every dtype and layout that a rung supports, and that of an
autoencoder in training."""

SMALL_PROBLEMS = (
    _square(16, 16, 3, 2, 1, batch=2),
    _square(8, 10, 2, 2, 0),
    _square(12, 9, 3, 1, 1),
    _square(3, 11, 3, 2, 0, batch=2, ceil=True),
    _square(5, 6, 2, 3, 1, ceil=True),
    MaxPool2dProblem(1, 24, 7, 37, (3, 5), (2, 3), (1, 2)),
    MaxPool2dProblem(2, 8, 2, 5, (3, 1), (2, 1), ceil_mode=True),
    _square(8, 14, 12, 4, 6),
    _square(1, 1, 1, 1, 0),
    MaxPool2dProblem(2, 12, 7, 5, (3, 3), (2, 2), (1, 1), layout="nhwc", x_pitch=24, y_pitch=40),
    MaxPool2dProblem(1, 6, 9, 8, (3, 2), (2, 1), (1, 1), dilation=(2, 3)),
    MaxPool2dProblem(1, 16, 9, 7, (3, 3), (2, 2), (1, 1), places=True),
    MaxPool2dProblem(1, 6, 9, 8, (3, 2), (2, 1), (1, 1), dilation=(2, 3), places=True, behind_relu=True),
    MaxPool2dProblem(2, 8, 6, 6, (2, 2), (2, 2), places=True, behind_relu=True),
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, kernels that are
not square, odd sizes, parts of larger buffers, windows with gaps, and places of maxima, behind a ReLU too."""


# --- the reference


def peer(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The maxima; where places are asked for, PyTorch finds them too, in 64 bits each."""
    p = problem
    if p.places:
        found = F.max_pool2d(
            inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode, return_indices=True
        )
        return found[0]
    return F.max_pool2d(inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode)


def exact(problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The maxima in float64."""
    return peer(problem, {"x": inputs["x"].double()})


# --- the places of maxima


def indices_of(f: MaxPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    """For each output, the pixel of its maximum, counted in the image row by row."""
    found = F.max_pool2d(x, f.kernel, f.stride, f.padding, f.dilation, f.ceil_mode, return_indices=True)
    return found[1]


def corners(
    windows: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of each window's first tap, for a tensor with an element a window."""
    rows, columns = (
        torch.arange(windows.shape[2 + d], device=windows.device) * stride[d] - padding[d] for d in (0, 1)
    )
    return rows.view(-1, 1), columns


def to_places(f: MaxPool2dProblem, indices: torch.Tensor) -> torch.Tensor:
    """Places in the window, a byte each, of pixels in the image."""
    top, left = corners(indices, f.stride, f.padding)
    rows = (indices.div(f.width, rounding_mode="floor") - top).div(f.dilation[0], rounding_mode="floor")
    columns = (indices % f.width - left).div(f.dilation[1], rounding_mode="floor")
    return (rows * f.kernel[1] + columns).to(torch.uint8)


def extra_outputs(problem: MaxPool2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
    if not problem.places:
        return {}
    p = problem
    size = (p.batch, p.channels, p.output_height, p.output_width)
    places = torch.empty(size, dtype=torch.uint8, device=device, memory_format=MEMORY_FORMAT[p.layout])
    return {"places": places}


def extra_references(
    problem: MaxPool2dProblem, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The places as numbers in float64."""
    if not problem.places:
        return {}
    places = to_places(problem, indices_of(problem, inputs["x"]))
    if problem.behind_relu:
        places = torch.where(exact(problem, inputs) <= 0, NOWHERE, places)
    return {"places": places.double()}


# --- the operation


class MaxPool2d(Operation[MaxPool2dProblem]):
    name = "max_pool2d"
    problem = MaxPool2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("max_pool2d", (NAIVE, SHARED_TILE, ROW_PACKS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def extra_outputs(self, problem: MaxPool2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return extra_outputs(problem, device)

    def extra_references(self, problem: MaxPool2dProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return extra_references(problem, inputs)

    def preferred(self, problem: MaxPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "row_packs", "shared_tile", "naive")


MAX_POOL2D = MaxPool2d()


# --- the PyTorch operator


_SCHEMA = "max_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, str? rung=None) -> Tensor"
_SCHEMA_WITH_PLACES = (
    "max_pool2d_with_places(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, "
    "bool behind_relu=False, str? rung=None) -> (Tensor, Tensor)"
)


def max_pool2d(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """The largest value of every window, as `torch.nn.functional.max_pool2d` without dilation.

    The stride is the kernel unless given. NCHW and channels_last inputs are taken as they are (the result
    has x's layout), anything else is copied first. Where x needs a gradient, and is channels_last or has windows
    side by side, the places of the maxima are kept for it. `rung` names one rung of the ladder instead of the chosen
    one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    if rung is None and _keeps_places(x, kernel, (stride, padding) == (kernel, (0, 0))):
        y: torch.Tensor = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, False, None)[0]
        return y
    return OPERATOR(x, kernel, stride, padding, ceil_mode, rung)


def _keeps_places(x: torch.Tensor, kernel: tuple[int, int], side_by_side: bool) -> bool:
    """Whether a gradient will be asked for that places make cheaper than x: their kernels are fast in NHWC, and for
    windows side by side."""
    if not (torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad):
        return False
    fast = x.dim() == 4 and (side_by_side or layout_of(x) == "nhwc")
    return fast and kernel[0] * kernel[1] <= NOWHERE


def max_pool2d_with_places(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    behind_relu: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `max_pool2d` gives, and for each output the place of its maximum in the window, row by row, in one byte: the
    first of equals, the last of NaNs.

    With `behind_relu`, where x came out of a ReLU, the place of a maximum that is not positive is 255: by such places
    `max_pool2d_backward` gives the gradient of what went into the ReLU, and so does autograd.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    y, places = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, behind_relu, rung)
    return y, places


def _problem(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    places: bool = False,
    behind_relu: bool = False,
) -> MaxPool2dProblem:
    check_images("max_pool2d", x)
    batch, channels, height, width = x.shape
    return MaxPool2dProblem(
        batch, channels, height, width, (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of("max_pool2d", x), layout_of(x),
        places=places, behind_relu=behind_relu,
    )  # fmt: skip


def _plan(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    rung: str | None = None,
) -> CallPlan:
    return pooling.plan(MAX_POOL2D, _problem(x, kernel, stride, padding, ceil_mode), x, rung)


def _fake(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    rung: str | None = None,
) -> torch.Tensor:
    return empty_pooled("max_pool2d", x, kernel, stride, padding, ceil_mode)


def _plan_with_places(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    behind_relu: bool = False,
    rung: str | None = None,
) -> CallPlan:
    problem = _problem(x, kernel, stride, padding, ceil_mode, True, behind_relu)
    return replace(pooling.plan(MAX_POOL2D, problem, x, rung), results=("y", "places"))


def _fake_with_places(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    behind_relu: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = empty_pooled("max_pool2d", x, kernel, stride, padding, ceil_mode)
    return y, torch.empty_like(y, dtype=torch.uint8)


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
_WITH_PLACES = define_planned(_SCHEMA_WITH_PLACES, _plan_with_places, _fake_with_places)
