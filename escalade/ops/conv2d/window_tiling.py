"""Tiles of output pixels whose windows lie in shared memory as a whole (kernels/conv2d/window_tile.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.device.recipe import Buffer, Ints, TiledMap
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.hopper_windows import Windows
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.elements import SMS, ceil_div

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
class Tiling:
    """What a config comes to for a problem."""

    problem: Conv2dProblem
    rows: int
    columns: int

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns by which a window is larger than its tile."""
        p = self.problem
        return (p.filter_height - 1) * p.dilation[0], (p.filter_width - 1) * p.dilation[1]

    @property
    def one_box(self) -> bool:
        """Whether a tile is stored as a whole: nothing lies between its rows, or the image ends where that begins."""
        return self.reach[1] == 0 or self.columns >= self.problem.output_width

    @property
    def window(self) -> tuple[int, int]:
        """Rows and columns of pixels."""
        return self.rows + self.reach[0], self.columns + self.reach[1]

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
        return ceil_div(self.problem.output_height, self.rows)

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.problem.output_width, self.columns)

    @property
    def tiles(self) -> int:
        return self.problem.batch * self.row_tiles * self.column_tiles

    @property
    def filter_tiles(self) -> int:
        return self.problem.filters // FILTERS

    @property
    def window_bytes(self) -> int:
        """Of a slab of channels."""
        return self.window[0] * self.window[1] * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """A window and what the last tap of the last columns reads beyond it."""
        assert self.width
        read = (self.width + self.reach[0] * self.window[1] + self.reach[1]) * ROW_BYTES
        return ceil_div(max(read, self.window_bytes), 1024) * 1024

    @property
    def constants(self) -> dict[str, Constant]:
        p = self.problem
        assert self.width
        return {
            "Element": arguments.element(p),
            "FILTER_HEIGHT": p.filter_height,
            "FILTER_WIDTH": p.filter_width,
            "DILATION_H": p.dilation[0],
            "DILATION_W": p.dilation[1],
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "ONE_BOX": self.one_box,
            "WGMMA_N": self.width,
            **arguments.epilogue_constants(p),
        }

    @property
    def window_map(self) -> TiledMap:
        """A slab of a window, which may begin and end outside of the image."""
        p, (rows, columns) = self.problem, self.window
        return TiledMap(
            Buffer("x"), p.dtype, (p.channels, p.width, p.height, p.batch), (SLAB, columns, rows, 1)
        )

    @property
    def weight_map(self) -> TiledMap:
        return Windows.of(self.problem).weight_map(Buffer("weight"), self.problem.filters, FILTERS)

    def _panel_map(self, buffer: str) -> TiledMap:
        p = self.problem
        sizes = (p.filters, p.output_width, p.output_height, p.batch)
        return TiledMap(Buffer(buffer), p.dtype, sizes, (FILTERS, *self.box, 1))

    @property
    def panel_maps(self) -> tuple[TiledMap, TiledMap]:
        """What is loaded of the residual, and what is stored, in one go."""
        return self._panel_map("residual" if self.problem.residual else "y"), self._panel_map("y")

    @property
    def shape(self) -> Ints:
        """`WindowShape`."""
        p = self.problem
        return Ints(
            (
                p.channels, p.output_height, p.output_width, *p.padding, self.row_tiles, self.column_tiles, self.tiles,
                self.filter_tiles, p.shortcut_channels,
            )
        )  # fmt: skip


def tilings_of(problem: Conv2dProblem) -> Iterator[Tiling]:
    """Images cut into equal columns, and into all numbers of rows that a product has room for."""
    width = problem.output_width
    most_pieces = max(1, width // LEAST_COLUMNS)
    for columns in sorted({ceil_div(width, pieces) for pieces in range(1, most_pieces + 1)}):
        if columns > MOST_IN_BOX:
            break
        for rows in range(1, problem.output_height + 1):
            tiling = Tiling(problem, rows, columns)
            if tiling.width is None or max(tiling.window) > MOST_IN_BOX:
                break
            yield tiling


@dataclass(frozen=True)
class WindowRung(Conv2dRung):
    """What both rungs of such tiles take."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.groups != 1:
            return f"{self.name} takes groups=1, not {p.groups}"
        if p.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {p.layout}"
        if p.dtype not in ("fp16", "bf16"):
            return f"{self.name} takes fp16 and bf16, not {p.dtype}"
        if p.stride != (1, 1):
            return f"{self.name} takes stride 1, not {p.stride}; overlapped_store takes any up to 8"
        if p.filters % FILTERS:
            return f"{self.name} takes multiples of {FILTERS} filters, not {p.filters}"
        if p.output_pixels >= 2**31 - 2 * SMS:
            return f"{self.name} counts tiles in 32 bits; {p.output_pixels} output pixels are too many"
        return None
