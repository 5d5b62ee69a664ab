"""Tiles of output pixels whose windows lie in shared memory as a whole (kernels/conv2d/window_tile.cuh)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Constant, Type
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, TiledMap
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.ends import UNPLACED, Ends
from escalade.ops.conv2d.hopper_windows import Windows
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.elements import SMS, ceil_div
from escalade.ops.ladder import Config

FILTERS = 64
"""Of a tile: the rows of a product."""
ROW_BYTES = 128
"""Channels of a pixel, 64 of 16 bits: what the swizzle spans."""
SLAB = 64
"""Channels of a window."""
TAP_BYTES = FILTERS * ROW_BYTES
THREADS = 384
WIDTHS = tuple(sorted({*range(16, 257, 16), 232, 248}))
"""Columns that a product may have (kernels/common/wgmma_widths.cuh)."""
MOST_IN_BOX = 256
"""Pixels that one copy takes along a side."""
LEAST_COLUMNS = 4
"""Of a tile, unless the image has fewer."""


@dataclass(frozen=True)
class Job:
    """A convolution with stride 1, whatever it is a part of."""

    windows: Windows
    filters: int
    ends: Ends
    shortcut: Windows | None = None
    placement: Ints = UNPLACED

    @staticmethod
    def of(problem: Conv2dProblem) -> Job:
        shortcut = Windows.of_shortcut(problem) if problem.shortcut_channels else None
        return Job(Windows.of(problem), problem.filters, Ends.of(problem), shortcut)

    @property
    def taps(self) -> int:
        return self.windows.taps[0] * self.windows.taps[1]

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns by which a window is larger than its tile."""
        (height, width), dilation = self.windows.taps, self.windows.dilation
        return (height - 1) * dilation[0], (width - 1) * dilation[1]

    @property
    def shortcut_channels(self) -> int:
        return self.shortcut.channels if self.shortcut else 0

    def output_map(self, buffer: str, box: tuple[int, int]) -> TiledMap:
        """Boxes of 64 filters of y, or of what has its shape: columns, rows. Pixels that a placement has apart are
        neighbours for the copy engine."""
        w, sizes = (
            self.windows,
            (self.filters, self.windows.output[1], self.windows.output[0], self.windows.batch),
        )
        if self.placement == UNPLACED:
            return TiledMap(Buffer(buffer), w.dtype, sizes, (FILTERS, *box, 1))
        step_h, step_w, offset_h, offset_w, height, width = self.placement.values
        pixel = self.filters * w.element_bytes
        return TiledMap(
            Buffer(buffer, (offset_h * width + offset_w) * pixel), w.dtype, sizes, (FILTERS, *box, 1),
            strides=(step_w * pixel, step_h * width * pixel, height * width * pixel),
        )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """What a config comes to for a job."""

    job: Job
    rows: int
    columns: int

    @property
    def one_box(self) -> bool:
        """Whether a tile is stored as a whole: nothing lies between its rows, or the image ends where that begins."""
        return self.job.reach[1] == 0 or self.columns >= self.job.windows.output[1]

    @property
    def window(self) -> tuple[int, int]:
        """Rows and columns of pixels."""
        return self.rows + self.job.reach[0], self.columns + self.job.reach[1]

    @property
    def width(self) -> int | None:
        """Columns of the product: the tile's pixels with those between its rows; None if they are too many."""
        stored = self.window[1] if self.one_box else self.columns
        pixels = (self.rows - 1) * self.window[1] + stored
        return next((width for width in WIDTHS if width >= pixels), None)

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of what is stored, or loaded of the residual, in one go."""
        return (self.window[1], self.rows) if self.one_box else (self.columns, 1)

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.rows // self.box[1]

    @property
    def row_tiles(self) -> int:
        return ceil_div(self.job.windows.output[0], self.rows)

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.job.windows.output[1], self.columns)

    @property
    def tiles(self) -> int:
        return self.job.windows.batch * self.row_tiles * self.column_tiles

    @property
    def filter_tiles(self) -> int:
        return self.job.filters // FILTERS

    @property
    def window_bytes(self) -> int:
        """Of a slab of channels."""
        return self.window[0] * self.window[1] * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """A window and what the last tap of the last columns reads beyond it."""
        assert self.width
        read = (self.width + self.job.reach[0] * self.window[1] + self.job.reach[1]) * ROW_BYTES
        return ceil_div(max(read, self.window_bytes), 1024) * 1024

    @property
    def constants(self) -> dict[str, Constant]:
        w = self.job.windows
        assert self.width
        return {
            "Element": Type(arguments.ELEMENTS[w.dtype]),
            "FILTER_HEIGHT": w.taps[0],
            "FILTER_WIDTH": w.taps[1],
            "DILATION_H": w.dilation[0],
            "DILATION_W": w.dilation[1],
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "ONE_BOX": self.one_box,
            "WGMMA_N": self.width,
            **self.job.ends.flags,
        }

    @property
    def window_map(self) -> TiledMap:
        """A slab of a window, which may begin and end outside of the image."""
        w, (rows, columns) = self.job.windows, self.window
        sizes = w.channels, w.image[1], w.image[0], w.batch
        return TiledMap(Buffer("x"), w.dtype, sizes, (SLAB, columns, rows, 1))

    @property
    def weight_map(self) -> TiledMap:
        return self.job.windows.weight_map(Buffer("weight"), self.job.filters, FILTERS)

    @property
    def panel_maps(self) -> tuple[TiledMap, TiledMap]:
        """What is loaded of the residual or the mask, and what is stored, in one go."""
        companion = "residual" if self.job.ends.companion else "y"
        return self.job.output_map(companion, self.box), self.job.output_map("y", self.box)

    @property
    def shape(self) -> Ints:
        """`WindowShape`."""
        w = self.job.windows
        return Ints(
            (
                w.channels, *w.output, *w.padding, self.row_tiles, self.column_tiles, self.tiles,
                self.filter_tiles, self.job.shortcut_channels,
            )
        )  # fmt: skip


def tilings_of(job: Job) -> Iterator[Tiling]:
    """Images cut into equal columns, and into all numbers of rows that a product has room for."""
    height, width = job.windows.output
    most_pieces = max(1, width // LEAST_COLUMNS)
    for columns in sorted({ceil_div(width, pieces) for pieces in range(1, most_pieces + 1)}):
        if columns > MOST_IN_BOX:
            break
        for rows in range(1, height + 1):
            tiling = Tiling(job, rows, columns)
            if tiling.width is None or max(tiling.window) > MOST_IN_BOX:
                break
            yield tiling


@dataclass(frozen=True)
class WindowRung(Conv2dRung):
    """What both rungs of such tiles take. Jobs are done for other operations too."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.groups != 1:
            return f"{self.name} takes groups=1, not {p.groups}"
        if p.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {p.layout}"
        if p.stride != (1, 1):
            return f"{self.name} takes stride 1, not {p.stride}; overlapped_store takes any up to 8"
        return self.job_limits(Job.of(p))

    def job_limits(self, job: Job) -> str | None:
        """Like `limits`, of NHWC and one group."""
        if job.windows.dtype not in ("fp16", "bf16"):
            return f"{self.name} takes fp16 and bf16, not {job.windows.dtype}"
        if job.filters % FILTERS:
            return f"{self.name} takes multiples of {FILTERS} filters, not {job.filters}"
        if job.windows.pixels >= 2**31 - 2 * SMS:
            return f"{self.name} counts tiles in 32 bits; {job.windows.pixels} output pixels are too many"
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        return self.job_configs(Job.of(problem))

    @abstractmethod
    def job_configs(self, job: Job) -> tuple[Config, ...]:
        """The cheapest first."""

    def clocks(self, problem: Conv2dProblem, config: Config) -> float:
        return self.job_clocks(Job.of(problem), config)

    @abstractmethod
    def job_clocks(self, job: Job, config: Config) -> float: ...

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        return Recipe((self.call(Job.of(problem), config),))

    @abstractmethod
    def call(self, job: Job, config: Config) -> KernelCall:
        """Over x, weight, bias, residual (or the mask), shortcut, shortcut_weight and y."""
