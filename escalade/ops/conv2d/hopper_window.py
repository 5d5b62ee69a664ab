"""Convolutions of 64 channels with stride 1 on Hopper: the window of a tile is copied once, and all taps read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, TiledMap
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.elements import MOST_SHARED, SMS, ceil_div
from escalade.ops.ladder import Config, Rung

CHANNELS = 64
"""128 bytes of a pixel, what the swizzle spans."""
FILTERS = 64
"""Of a block: the rows of a product."""
ROW_BYTES = 128
WIDTHS = tuple(sorted({*range(16, 257, 16), 232, 248}))
"""Columns that a product may have (kernels/common/wgmma_widths.cuh)."""
MOST_IN_BOX = 256
"""Pixels that one copy takes along a side."""
LEAST_COLUMNS = 4
"""Of a tile, unless the image has fewer."""
MOST_STAGES = 4
MOST_CONFIGS = 6
"""Worth a measurement, the cheapest of as many widths of the product."""

COPY_CYCLE = 39.0
"""Bytes that a multiprocessor gets from L2 in a cycle: 9 TB/s of 132 at 1.75 GHz."""
SHARED_CYCLE = 128.0
"""Bytes that tensor cores read from shared memory in a cycle."""
COLUMN_CYCLES = 0.5
"""Of the tensor cores for one column of a step, 64 filters by 16 channels."""
START_CYCLES = 1000.0
"""Until a block's first copies arrive."""
TURN_CYCLES = 400.0
"""From one tile's products to the next one's: 13% of the tensor cores' time with tiles of 4 x 56 pixels."""
END_CYCLES = 500.0
"""Of a tile's end, whatever its size: barriers and the way through the panel."""
END_CYCLES_COLUMN = 4.0
END_CYCLES_BOX = 60.0
"""To start a store."""


@dataclass(frozen=True)
class WindowConfig(Config):
    rows: int
    """Of output pixels of a tile."""
    columns: int
    stages: int
    """Windows in shared memory."""


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
    def blocks(self) -> int:
        """Of every 64 filters: as many as have work at once."""
        return max(1, min(self.tiles, SMS // self.filter_tiles))

    @property
    def weight_bytes(self) -> int:
        return self.problem.taps * FILTERS * ROW_BYTES

    @property
    def window_bytes(self) -> int:
        return self.window[0] * self.window[1] * ROW_BYTES

    def shared_bytes(self, stages: int) -> int:
        """Weights, a panel for each of two warpgroups, windows, and their barriers."""
        assert self.width
        read = (self.width + self.reach[0] * self.window[1] + self.reach[1]) * ROW_BYTES
        stage = ceil_div(max(read, self.window_bytes), 1024) * 1024 + 16
        barriers = 8 * (self.problem.filter_height + 4)
        return self.weight_bytes + 2 * self.width * ROW_BYTES + stages * stage + barriers

    @property
    def stages(self) -> int:
        """As many as there is room for; two, so that one is copied while another is read, or none."""
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self.shared_bytes(n) <= MOST_SHARED)
        return next(fitting, 0)

    @property
    def cost(self) -> float:
        """Cycles of the block with the most tiles, as far as tensor cores, shared memory, L2 and ends decide."""
        assert self.width
        step = max(COLUMN_CYCLES * self.width, (FILTERS + self.width) * 32 / SHARED_CYCLE)
        products = self.problem.taps * 4 * step
        end = END_CYCLES + END_CYCLES_COLUMN * self.width + END_CYCLES_BOX * self.rows // self.box[1]
        copies = self.window_bytes / COPY_CYCLE
        # The end of one tile lies under the products of the other warpgroup's.
        tile = max(products + TURN_CYCLES, copies, (products + TURN_CYCLES + end) / 2)
        first_row = self.weight_bytes / self.problem.filter_height / COPY_CYCLE
        waves = ceil_div(self.blocks * self.filter_tiles, SMS)
        return waves * (START_CYCLES + copies + first_row + ceil_div(self.tiles, self.blocks) * tile + end)


def tilings(problem: Conv2dProblem) -> Iterator[Tiling]:
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
            if tiling.stages:
                yield tiling


@dataclass(frozen=True)
class Window(Conv2dRung):
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
            return (
                f"{self.name} takes stride 1, not {p.stride}; producer_consumer takes 2, fused_epilogue any"
            )
        if p.channels != CHANNELS or p.filters % FILTERS:
            return (
                f"{self.name} takes {CHANNELS} channels and multiples of {FILTERS} filters, not {p.channels} and "
                f"{p.filters}"
            )
        if p.output_pixels >= 2**31 - 2 * SMS:
            return f"{self.name} counts tiles in 32 bits; {p.output_pixels} output pixels are too many"
        if next(tilings(p), None) is None:
            return (
                f"{self.name} keeps all {p.taps} taps of {FILTERS} filters in shared memory, 8 KiB each, and two "
                f"windows of {p.dilation[0] * (p.filter_height - 1) + 1}x{p.dilation[1] * (p.filter_width - 1) + 1} "
                f"pixels or more; there are {MOST_SHARED // 1024} KiB"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        by_width: dict[int | None, Tiling] = {}
        for tiling in sorted(tilings(problem), key=lambda tiling: tiling.cost):
            by_width.setdefault(tiling.width, tiling)
        cheapest = list(by_width.values())[:MOST_CONFIGS]
        return tuple(WindowConfig(t.rows, t.columns, t.stages) for t in cheapest)

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        assert isinstance(config, WindowConfig)
        p = problem
        tiling = Tiling(p, config.rows, config.columns)
        assert tiling.width
        constants: dict[str, Constant] = {
            "Element": arguments.element(p),
            "BF16": p.dtype == "bf16",
            "FILTER_HEIGHT": p.filter_height,
            "FILTER_WIDTH": p.filter_width,
            "DILATION_H": p.dilation[0],
            "DILATION_W": p.dilation[1],
            "TILE_ROWS": tiling.rows,
            "TILE_COLUMNS": tiling.columns,
            "ONE_BOX": tiling.one_box,
            "WGMMA_N": tiling.width,
            "STAGES": config.stages,
            **arguments.epilogue_constants(p),
        }
        window_rows, window_columns = tiling.window
        windows = TiledMap(
            Buffer("x"),
            p.dtype,
            (CHANNELS, p.width, p.height, p.batch),
            (CHANNELS, window_columns, window_rows, 1),
        )
        weights = TiledMap(Buffer("weight"), p.dtype, (p.taps * CHANNELS, p.filters), (CHANNELS, FILTERS))
        sizes = (p.filters, p.output_width, p.output_height, p.batch)
        results = TiledMap(Buffer("y"), p.dtype, sizes, (FILTERS, *tiling.box, 1))
        residuals = TiledMap(
            Buffer("residual" if p.residual else "y"), p.dtype, sizes, (FILTERS, *tiling.box, 1)
        )
        shape = Ints(
            (
                p.output_height, *p.padding, tiling.row_tiles, tiling.column_tiles, tiling.tiles, tiling.filter_tiles,
            )
        )  # fmt: skip
        call = KernelCall(
            Program.of("conv2d/hopper_window.cu", "conv2d_hopper_window", constants),
            (tiling.blocks * tiling.filter_tiles, 1, 1),
            (384, 1, 1),
            (windows, weights, residuals, results, Buffer("bias", optional=True), shape),
            shared_bytes=tiling.shared_bytes(config.stages),
            overlap=True,
        )
        return Recipe((call,))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Window(
        "window",
        "the window of a tile of 64 channels is copied once and all taps read it in place, weights stay in shared "
        "memory, and two warpgroups take turns at tiles",
        below="producer_consumer",
        # 64to64_56_k3 at batch 256, 59 GFLOP. Below: tiles of 256x64 copy 40 KB a slab, 1050 cycles where its products
        # take 512, so 9 * 1050 + 2000 cycles a tile and 24 tiles a multiprocessor: 157 us at 1.75 GHz. Here 36 steps of
        # 116 cycles are a tile of 4 x 56 pixels, 28 of them a multiprocessor: 67 us, at 88% of the tensor cores and
        # the clock that power leaves about 93.
        predicted_gain=1.7,
    ),
)
