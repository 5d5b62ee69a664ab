"""Tiles of output pixels whose windows lie in shared memory as a whole (kernels/conv2d/window_tile.cuh)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from escalade.device.program import Constant
from escalade.device.recipe import Buffer, Ints, TiledMap
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import C
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.job import Job, JobRung
from escalade.ops.conv2d.rungs.tma_windows import pixel_strides

FILTERS = 64
"""Filters of a tile: the rows of a product."""
ROW_BYTES = 128
"""Channels of a pixel, 64 of 16 bits or 32 of 32: what the swizzle spans, and a window has of them."""
TAP_BYTES = FILTERS * ROW_BYTES
THREADS = 384
WIDTHS = tuple(sorted({*range(16, 257, 16), 232, 248}))
"""Columns that a product may have (kernels/common/wgmma_widths.cuh)."""
MOST_IN_BOX = 256
"""Pixels that one copy takes along a side."""
LEAST_COLUMNS = 4
"""Columns of a tile at least, unless the image has fewer."""


@dataclass(frozen=True)
class Tiling:
    """What a config comes to for a job."""

    job: Job
    rows: int
    columns: int
    images: int = 1
    """Images of a tile: whole ones, if several."""

    @property
    def stacked(self) -> bool:
        return self.images > 1

    @cached_property
    def gap(self) -> tuple[int, int]:
        """Rows and columns of pixels that a tile has more in its window: the padding alone, where the next row or image
        begins with some."""
        return self.job.windows.padding if self.stacked else self.job.reach

    @cached_property
    def one_box(self) -> bool:
        """Whether a tile is stored as a whole: nothing lies between its rows, or the image ends where that begins."""
        return self.job.reach[1] == 0 or self.columns >= self.job.windows.output[1]

    @cached_property
    def window(self) -> tuple[int, int]:
        """Rows and columns of pixels, of an image."""
        return self.rows + self.gap[0], self.columns + self.gap[1]

    @cached_property
    def width(self) -> int | None:
        """Columns of the product: the tile's pixels with those between its rows; None if they are too many."""
        if self.stacked:
            pixels = self.images * self.window[0] * self.window[1]
        else:
            stored = self.window[1] if self.one_box else self.columns
            pixels = (self.rows - 1) * self.window[1] + stored
        place = bisect_left(WIDTHS, pixels)
        return WIDTHS[place] if place < len(WIDTHS) else None

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of what is stored, or loaded of the residual, in one go."""
        if self.stacked:
            return self.window[1], self.window[0]
        return (self.window[1], self.rows) if self.one_box else (self.columns, 1)

    @property
    def boxes(self) -> int:
        """Boxes of a tile."""
        return 1 if self.one_box else self.rows

    @property
    def shared_panel(self) -> bool:
        """Whether both warpgroups have their results of 32 bits leave by one panel."""
        return self.job.windows.element_bytes == 4

    @cached_property
    def row_tiles(self) -> int:
        return ceil_div(self.job.windows.output[0], self.rows)

    @cached_property
    def column_tiles(self) -> int:
        return ceil_div(self.job.windows.output[1], self.columns)

    @cached_property
    def tiles(self) -> int:
        return ceil_div(self.job.windows.batch, self.images) * self.row_tiles * self.column_tiles

    @property
    def filter_tiles(self) -> int:
        return self.job.filters // FILTERS

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of a slab of channels of the window."""
        return self.images * self.window[0] * self.window[1] * ROW_BYTES

    @cached_property
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
            "Element": element(w.dtype),
            "FILTER_HEIGHT": w.taps[0],
            "FILTER_WIDTH": w.taps[1],
            "DILATION_H": w.dilation[0],
            "DILATION_W": w.dilation[1],
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "TILE_IMAGES": self.images,
            "ONE_BOX": self.one_box,
            "WGMMA_N": self.width,
            "MN_MAJOR": w.mn_major is not None,
            **self.job.epilogue.flags,
        }

    @property
    def window_map(self) -> TiledMap:
        return self.job.windows.window_map(Buffer("x"), self.window[1], self.window[0], self.images)

    def weight_map(self, weight: Buffer) -> TiledMap:
        return self.job.windows.weight_map(weight, self.job.filters, FILTERS)

    def _panel_map(self, buffer: str) -> TiledMap:
        """Boxes of 64 filters, or of half as many of 32 bits. Pixels that a placement has apart are neighbours for
        TMA."""
        job, w = self.job, self.job.windows
        sizes, box = (job.filters, w.output[1], w.output[0], w.batch), (w.slab, *self.box, self.images)
        if job.placement == UNPLACED:
            strides = pixel_strides(job.y_pitch * w.element_bytes, w.output) if buffer == "y" else ()
            return TiledMap(Buffer(buffer), w.dtype, sizes, box, strides=strides)
        step_h, step_w, offset_h, offset_w, height, width = job.placement.values
        pixel = job.filters * w.element_bytes
        return TiledMap(
            Buffer(buffer, (offset_h * width + offset_w) * pixel), w.dtype, sizes, box,
            strides=(step_w * pixel, step_h * width * pixel, height * width * pixel),
        )  # fmt: skip

    @property
    def panel_maps(self) -> tuple[TiledMap, TiledMap]:
        """What is loaded of the residual or the mask, and what is stored, in one go."""
        return self._panel_map("residual" if self.job.epilogue.companion else "y"), self._panel_map("y")

    @property
    def shape(self) -> Ints:
        """The values of the kernel's `WindowShape`."""
        w = self.job.windows
        return Ints(
            (
                w.batch, w.channels, *w.output, *w.padding, self.row_tiles, self.column_tiles, self.tiles,
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


def stacks_of(job: Job) -> Iterator[Tiling]:
    """Several whole images, as many as a product has room for, if their padding can be shared."""
    w = job.windows
    if w.output != w.image or job.reach != (2 * w.padding[0], 2 * w.padding[1]):
        return
    for images in range(2, min(w.batch, WIDTHS[-1]) + 1):
        tiling = Tiling(job, *w.output, images)
        if tiling.width is None:
            break
        yield tiling


@dataclass(frozen=True)
class WindowRung(JobRung[C]):
    """What both rungs of such tiles take."""

    dtypes: tuple[str, ...] = ("fp16", "bf16")

    @property
    def takes_apart(self) -> tuple[str, ...]:
        return ("x", "y")

    def job_limits(self, job: Job) -> str | None:
        w = job.windows
        if w.dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(self.dtypes)}, not {w.dtype}"
        if w.stride != (1, 1):
            return f"{self.name} takes stride 1, not {w.stride}; overlapped_store takes any up to 8"
        if job.filters % FILTERS:
            return f"{self.name} takes multiples of {FILTERS} filters, not {job.filters}"
        if w.pixels >= 2**31 - 2 * self.card.multiprocessors:
            return f"{self.name} counts tiles in 32 bits; {w.pixels} output pixels are too many"
        return None
