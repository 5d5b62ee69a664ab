"""Maximum over windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import NamePattern, spell_pair
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS, MEMORY_FORMAT, form_of, layout_of, shape_of
from escalade.ops.shared.pooling import empty_output, random_inputs
from escalade.ops.shared.window_runs import ChannelPacks, RowPacks
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows, empty_pooled

# --- the problem


NOWHERE = 255
"""Stored instead of a place where a ReLU before the pool clipped the maximum."""


@dataclass(frozen=True)
class MaxPool2dProblem(WindowedImages):
    """y[oh, ow] = max of x over the window of `kernel` pixels at (oh, ow) * stride - padding.

    Padding never wins. The pixels of a window are `dilation` apart. With `places` there is a second result for the
    gradient, buffer `places`: the position of each maximum in its window, row-major, in one byte; the first of equal
    values, the last of NaNs. With `behind_relu` (x is the output of a ReLU) it is 255 for maxima that are not positive,
    which pass no gradient.
    """

    NAME: ClassVar = NamePattern(
        "pooling",
        WINDOWS + "[d{dilation}]_b{batch}{ceil_mode?_ceil}[_{kept:places|behindrelu}]",
        {"kept": ""},
    )

    dilation: tuple[int, int] = (1, 1)
    places: bool = False
    behind_relu: bool = False

    rounding = 0.0
    """A maximum is one of the inputs: exact."""

    def __post_init__(self) -> None:
        check_windows("max_pool2d", self)
        if self.behind_relu and not self.places:
            raise UnsupportedError(f"{self.name}: behind_relu affects only places; set places too")
        if self.places:
            require_bytes_for_places(self.kernel)

    @property
    def kept(self) -> str:
        """`places` and `behind_relu` as the name has them."""
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


def require_bytes_for_places(kernel: tuple[int, int]) -> None:
    """Raise for windows with more pixels than a byte can number."""
    if kernel[0] * kernel[1] > NOWHERE:
        raise UnsupportedError(
            f"kernel {spell_pair(kernel)}: a place is stored in a byte, so windows have at most {NOWHERE} pixels"
        )


# --- rungs

PLACES = Buffer("places", optional=True)


def windows(problem: MaxPool2dProblem) -> Ints:
    return Ints.of("max_pool2d/windows.cuh", "Windows", problem=problem)


class Naive(ThreadsRung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: MaxPool2dProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        return launch(
            Program.of("max_pool2d/naive.cu", problem=p),
            blocks(p.output_elements, config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), PLACES, pooling.shape(p), windows(p),
        )  # fmt: skip


# Predictions are for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
NAIVE = Naive("naive", "one thread per output, every window read from global memory", None, None)
ROW_PACKS = RowPacks[MaxPool2dProblem](
    "row_packs",
    "16 bytes of a row per thread, for a run of outputs in one row, or two if windows overlap",
    below="shared_tile",
    # 51 million outputs, eight per thread: 6 million threads of 150 instructions, near the DRAM bound, against 175 us.
    predicted_gain=1.4,
    source="max_pool2d/row_packs.cu",
    operands=(PLACES,),
)


# --- rung shared_tile: the input of a tile of windows in shared memory


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
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if problem.dilation != (1, 1):
            return f"{self.name} needs windows without dilation, not {spell_pair(problem.dilation)}"
        if problem.places:
            return f"{self.name} computes maxima without their places"
        if not self.configs(problem):
            return (
                f"{self.name} holds the input of a tile in 48 KB of shared memory, which these windows exceed"
            )
        if self._blocks(problem, _TILES[-2]) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: MaxPool2dProblem) -> tuple[TileConfig, ...]:
        """Order by waste at the edges plus halo."""
        fitting = [tile for tile in _TILES if tile.shared_bytes(problem) <= _STATIC_SHARED_BYTES]

        def cost(tile: TileConfig) -> float:
            rows, columns = tile.tiles(problem)
            return rows * columns * (tile.rows * tile.columns + tile.shared_bytes(problem))

        return tuple(sorted(fitting, key=cost))

    def recipe(self, problem: MaxPool2dProblem, config: TileConfig) -> Recipe:
        return launch(
            Program.of("max_pool2d/shared_tile.cu", problem=problem, config=config),
            self._blocks(problem, config),
            config.rows * config.columns,
            Buffer("x"), Buffer("y"), pooling.shape(problem), *config.tiles(problem),
        )  # fmt: skip

    def _blocks(self, problem: MaxPool2dProblem, tile: TileConfig) -> int:
        rows, columns = tile.tiles(problem)
        return max(1, problem.batch * problem.channels * rows * columns)


SHARED_TILE = SharedTile(
    "shared_tile",
    "the input of a tile of windows is loaded into shared memory once, borders included",
    below="naive",
    # 51 million threads of 100 instructions (175 us) instead of 220 (380 us).
    predicted_gain=2.0,
)
VECTORISED = ChannelPacks[MaxPool2dProblem](
    "vectorised",
    "16 bytes of channels per thread, for a run of outputs whose overlapping windows are read once",
    below="naive",
    # At the DRAM bound, 121 us, against 380 us.
    predicted_gain=3.0,
    source="max_pool2d/vectorised.cu",
    operands=(PLACES,),
)


# --- problems


def _square(
    channels: int, size: int, kernel: int, stride: int, padding: int, batch: int = 1, ceil: bool = False
) -> MaxPool2dProblem:
    return MaxPool2dProblem(
        batch, channels, size, size, (kernel, kernel), (stride, stride), (padding, padding), ceil
    )


# --- the reference


def peer(problem: MaxPool2dProblem, inputs: Tensors) -> torch.Tensor:
    """If places are stored, PyTorch computes its 64-bit indices too, for a fair comparison."""
    p = problem
    if p.places:
        found = F.max_pool2d(
            inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode, return_indices=True
        )
        return found[0]
    return F.max_pool2d(inputs["x"], p.kernel, p.stride, p.padding, p.dilation, p.ceil_mode)


exact = in_float64(peer)


# --- the places of maxima


def indices_of(f: MaxPool2dProblem, x: torch.Tensor) -> torch.Tensor:
    """Return the flat index in the image of each output's maximum."""
    found = F.max_pool2d(x, f.kernel, f.stride, f.padding, f.dilation, f.ceil_mode, return_indices=True)
    return found[1]


def corners(
    windows: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each window's first tap, broadcastable to a tensor with one element per window."""
    rows, columns = (
        torch.arange(windows.shape[2 + d], device=windows.device) * stride[d] - padding[d] for d in (0, 1)
    )
    return rows.view(-1, 1), columns


def to_places(f: MaxPool2dProblem, indices: torch.Tensor) -> torch.Tensor:
    """Convert flat indices in the image to places in the window, one byte each."""
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


def extra_references(problem: MaxPool2dProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    if not problem.places:
        return {}
    places = to_places(problem, indices_of(problem, inputs["x"]))
    if problem.behind_relu:
        places = torch.where(exact(problem, inputs) <= 0, NOWHERE, places)
    return {"places": places.double()}


# --- the operation


class MaxPool2dOperation(Operation[MaxPool2dProblem]):
    name = "max_pool2d"
    problem = MaxPool2dProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("max_pool2d", (NAIVE, SHARED_TILE, ROW_PACKS, VECTORISED))
    problems = (
        *(_square(64, 112, 3, 2, 1, batch) for batch in (1, 32, 256)),
        MaxPool2dProblem.parse("256_32_k2s2_b256_behindrelu"),
    )
    """Problems of `escalade ladder`: ResNet's, and an autoencoder's in training."""
    small_problems = (
        _square(16, 16, 3, 2, 1, batch=2),
        _square(8, 10, 2, 2, 0),
        MaxPool2dProblem(2, 3, 1, 24, (1, 2), (1, 2)),
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
    """Small problems: windows that overlap, touch and leave gaps, both roundings, rectangular kernels, odd sizes, one
    row, pitches, dilation, and places, also behind a ReLU."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "row_packs", "shared_tile", "naive")

    def extra_outputs(self, problem: MaxPool2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return extra_outputs(problem, device)

    def extra_references(self, problem: MaxPool2dProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return extra_references(problem, inputs)


MAX_POOL2D = MaxPool2dOperation()


# --- the PyTorch operator


def max_pool2d(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Maximum of every window, as `torch.nn.functional.max_pool2d` without dilation.

    The stride defaults to the kernel. NCHW and channels_last inputs are read in place and give the result's layout;
    others are copied first. If x requires grad and is channels_last, or its windows do not overlap, the places of the
    maxima are saved for the gradient. `rung` names a rung of the ladder instead of the chosen one.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    if rung is None and _keeps_places(x, kernel, (stride, padding) == (kernel, (0, 0))):
        y: torch.Tensor = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, False, None)[0]
        return y
    return OPERATOR(x, kernel, stride, padding, ceil_mode, rung)


def _keeps_places(x: torch.Tensor, kernel: tuple[int, int], side_by_side: bool) -> bool:
    """Return True if a gradient will be needed that is faster from places than from x: in NHWC, and for
    non-overlapping windows."""
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
    """`max_pool2d`, and the place of each maximum in its window, row-major, in one byte: the first of equal values, the
    last of NaNs.

    With `behind_relu` (x is the output of a ReLU) the place of a maximum that is not positive is 255. From such places
    `max_pool2d_backward` and autograd compute the gradient of the ReLU's input.
    """
    kernel = pooling.as_pair(kernel, "kernel")
    stride = kernel if stride is None else pooling.as_pair(stride, "stride")
    padding = pooling.as_pair(padding, "padding")
    y, places = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, behind_relu, rung)
    return y, places


def _plan(
    x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, rung: str | None = None
) -> CallPlan:
    window = (kernel, stride, padding, ceil_mode)
    return CallPlan(
        MAX_POOL2D,
        lambda: empty_pooled(x, *window),
        lambda: MaxPool2dProblem(*shape_of(x), *window, *form_of(x)),
    )


def _plan_with_places(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    behind_relu: bool = False,
    rung: str | None = None,
) -> CallPlan:
    window = (kernel, stride, padding, ceil_mode)
    return CallPlan(
        MAX_POOL2D,
        lambda: {"y": empty_pooled(x, *window), "places": empty_pooled(x, *window, dtype=torch.uint8)},
        lambda: MaxPool2dProblem(*shape_of(x), *window, *form_of(x), places=True, behind_relu=behind_relu),
    )


OPERATOR = define_planned("max_pool2d", _plan, "x: N C H W")
_WITH_PLACES = define_planned(
    "max_pool2d_with_places", _plan_with_places, "x: N C H W", returns="(Tensor, Tensor)"
)
