"""Tiles of output pixels whose whole window is in shared memory (kernels/conv2d/window_tile.cuh)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from escalade.device.recipe import Buffer, Ints, TiledMap
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import C
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv, WgmmaConvRung, pixel_strides

FILTERS = 64
"""Filters per tile: the M of a wgmma."""
ROW_BYTES = 128
"""Most bytes of channels per pixel of a window, 64 of 16 bits or 32 of 32: the widest swizzle span."""
NARROW_ROW_BYTES = 64
"""Bytes of 64 channels or filters of 8 bits."""
TAP_BYTES = FILTERS * ROW_BYTES
THREADS = 384
INTEGER_WIDTHS = tuple(range(16, 257, 16))
"""Supported N of a wgmma in int8."""
WIDTHS = tuple(sorted({*INTEGER_WIDTHS, 232, 248}))
"""Supported N of a wgmma (kernels/common/wgmma_widths.cuh)."""
BOX_ALIGNMENT = 128
"""Alignment in bytes of a TMA box in shared memory: rows of an odd number of 64-byte pixels do not have it."""
MOST_IN_BOX = 256
"""Largest side of a TMA box."""
LEAST_COLUMNS = 4
"""Smallest number of columns per tile, unless the image has fewer."""


@dataclass(frozen=True)
class Tiling:
    """The tiling of a convolution by one config."""

    conv: WgmmaConv
    rows: int
    columns: int
    images: int = 1
    """Images per tile: whole ones, if several."""

    @property
    def row_bytes(self) -> int:
        """Bytes of channels per pixel of a window, the swizzle span."""
        w = self.conv.windows
        is_narrow = w.element_bytes == 1 and w.channels == NARROW_ROW_BYTES
        return NARROW_ROW_BYTES if is_narrow else ROW_BYTES

    @property
    def staged_row_bytes(self) -> int:
        """Bytes of filters per pixel of a staging tile, the swizzle span."""
        return min(FILTERS * self.conv.windows.element_bytes, ROW_BYTES)

    @property
    def stacked(self) -> bool:
        return self.images > 1

    @cached_property
    def gap(self) -> tuple[int, int]:
        """Rows and columns that the window has more than the tile. Stacked images need only the padding, which the next
        row or image shares."""
        return self.conv.windows.padding if self.stacked else self.conv.reach

    @cached_property
    def one_box(self) -> bool:
        """True if a tile is stored in one box: there is nothing between its rows, or the image ends there."""
        return self.conv.reach[1] == 0 or self.columns >= self.conv.windows.output[1]

    @cached_property
    def window(self) -> tuple[int, int]:
        """Rows and columns of the window of one image."""
        return self.rows + self.gap[0], self.columns + self.gap[1]

    @cached_property
    def width(self) -> int | None:
        """N of the product: the pixels of the tile and those between its rows; None if there are too many, or if TMA
        cannot copy its rows one by one."""
        if self.stacked:
            pixels = self.images * self.window[0] * self.window[1]
        else:
            stored = self.window[1] if self.one_box else self.columns
            pixels = (self.rows - 1) * self.window[1] + stored
        if self.boxes > 1 and self.window[1] * self.staged_row_bytes % BOX_ALIGNMENT:
            return None
        widths = INTEGER_WIDTHS if self.conv.windows.element_bytes == 1 else WIDTHS
        index = bisect_left(widths, pixels)
        return widths[index] if index < len(widths) else None

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of a box that is stored, or loaded from the residual, at once."""
        if self.stacked:
            return self.window[1], self.window[0]
        return (self.window[1], self.rows) if self.one_box else (self.columns, 1)

    @property
    def boxes(self) -> int:
        return 1 if self.one_box else self.rows

    @property
    def shared_panel(self) -> bool:
        """True if both warpgroups store their 32-bit results through one staging tile."""
        return self.conv.windows.element_bytes == 4

    @cached_property
    def row_tiles(self) -> int:
        return ceil_div(self.conv.windows.output[0], self.rows)

    @cached_property
    def column_tiles(self) -> int:
        return ceil_div(self.conv.windows.output[1], self.columns)

    @cached_property
    def tiles(self) -> int:
        return ceil_div(self.conv.windows.batch, self.images) * self.row_tiles * self.column_tiles

    @property
    def filter_tiles(self) -> int:
        return self.conv.filters // FILTERS

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of one k-tile of the window."""
        return self.images * self.window[0] * self.window[1] * self.row_bytes

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of a window, including what the last tap of the last columns reads past its end."""
        assert self.width
        read = (self.width + self.conv.reach[0] * self.window[1] + self.conv.reach[1]) * self.row_bytes
        return ceil_div(max(read, self.window_bytes), 1024) * 1024

    @property
    def window_map(self) -> TiledMap:
        rows, columns = self.window
        return self.conv.windows.window_map(Buffer("x"), columns, rows, self.images, self.row_bytes)

    def weight_map(self, weight: Buffer) -> TiledMap:
        """Return the map of one k-tile and tap of 64 filters. In 8 bits, rows 8 apart of 16 are adjacent filters."""
        w = self.conv.windows
        if w.element_bytes > 1:
            return w.weight_map(weight, self.conv.filters, FILTERS)
        depth = self.conv.taps * w.channels  # elements are bytes
        return TiledMap(
            weight, w.dtype, (depth, 8, 2, self.conv.filters // 16), (self.row_bytes, 8, 2, FILTERS // 16),
            self.row_bytes, (2 * depth, depth, 16 * depth),
        )  # fmt: skip

    def _panel_map(self, buffer: str) -> TiledMap:
        """Return the map of boxes of 64 filters (32 if 32-bit). TMA strides make the pixels of a placement adjacent."""
        conv, w = self.conv, self.conv.windows
        row = self.staged_row_bytes
        sizes = (conv.filters, w.output[1], w.output[0], w.batch)
        box = (row // w.element_bytes, *self.box, self.images)
        if conv.placement == UNPLACED:
            strides = pixel_strides(conv.y_pitch * w.element_bytes, w.output) if buffer == "y" else ()
            return TiledMap(Buffer(buffer), w.dtype, sizes, box, row, strides)
        step_h, step_w, offset_h, offset_w, height, width = conv.placement.values
        pixel = conv.filters * w.element_bytes
        return TiledMap(
            Buffer(buffer, (offset_h * width + offset_w) * pixel), w.dtype, sizes, box,
            strides=(step_w * pixel, step_h * width * pixel, height * width * pixel),
        )  # fmt: skip

    @property
    def panel_maps(self) -> tuple[TiledMap, TiledMap]:
        """Maps for loading the residual or mask, and for storing y."""
        return self._panel_map("residual" if self.conv.epilogue.aux else "y"), self._panel_map("y")

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.row_tiles, self.column_tiles, self.tiles, self.filter_tiles

    @property
    def shape(self) -> Ints:
        return Ints.of("conv2d/window_tile.cuh", "WindowShape", windows=self.conv.windows, tiling=self)


def tilings_of(conv: WgmmaConv) -> Iterator[Tiling]:
    """Yield tilings of single images: equal columns, and every number of rows that fits into a product."""
    height, width = conv.windows.output
    most_pieces = max(1, width // LEAST_COLUMNS)
    for columns in sorted({ceil_div(width, pieces) for pieces in range(1, most_pieces + 1)}):
        if columns > MOST_IN_BOX:
            break
        for rows in range(1, height + 1):
            tiling = Tiling(conv, rows, columns)
            if tiling.width is None or max(tiling.window) > MOST_IN_BOX:
                break
            yield tiling


def stacks_of(conv: WgmmaConv) -> Iterator[Tiling]:
    """Yield tilings of several whole images that fit into a product, if they can share their padding."""
    w = conv.windows
    if w.output != w.image or conv.reach != (2 * w.padding[0], 2 * w.padding[1]):
        return
    for images in range(2, min(w.batch, WIDTHS[-1]) + 1):
        tiling = Tiling(conv, *w.output, images)
        if tiling.width is None:
            break
        yield tiling


@dataclass(frozen=True)
class WindowRung(WgmmaConvRung[C]):
    """Base class of the rungs with such tiles."""

    dtypes: tuple[str, ...] = ("fp16", "bf16")

    pitched_buffers = ("x", "y")
    supports_pitched_residual = True

    def conv_limits(self, conv: WgmmaConv) -> str | None:
        w = conv.windows
        if w.stride != (1, 1):
            return f"{self.name} takes stride 1, not {w.stride}; overlapped_store takes any up to 8"
        if conv.filters % FILTERS:
            return f"{self.name} takes multiples of {FILTERS} filters, not {conv.filters}"
        if w.pixels >= 2**31 - 2 * self.card.multiprocessors:
            return f"{self.name} counts tiles in 32 bits; {w.pixels} output pixels are too many"
        return None
