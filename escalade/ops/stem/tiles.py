"""How the tensor-core rungs cut a stem into tiles, and which cut suits a problem."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from escalade.device.program import Constant
from escalade.ops.base.card import BLOCK_SHARED, LEAST_SHARED, Card
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.stem import arguments
from escalade.ops.stem.problem import Pool, StemProblem

POOLS: dict[Pool | None, int] = {None: 0, (2, 2, 0): 2, (3, 2, 1): 3}
"""What is pooled in registers, and its number in kernels/stem/tile.cuh."""
PIXEL_BYTES = 8
MOST_WIDTH = 8
"""A filter row is one or two steps of 4 taps."""
STAGING_CLOCKS = 3000
"""An estimate of how long a block waits for its first pixels, converts and stores them, and starts."""


def filter_steps(problem: StemProblem) -> int:
    """Steps of the product, 16 values of k each: 4 taps of a filter row by 4 channels."""
    return problem.filter_height * blocks(problem.filter_width, 4)


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` rows of y by `columns` columns of the convolution."""

    problem: StemProblem
    rows: int
    columns: int

    @property
    def pool(self) -> int:
        return POOLS[self.problem.pool]

    @property
    def halo(self) -> int:
        """Pooling windows overlap by a column: where there are several tiles in a row, each computes it."""
        needed = min(self.problem.conv_width, 2 * self.problem.output_width)
        return int(self.pool == 3 and self.columns < needed)

    @property
    def row_tiles(self) -> int:
        return blocks(self.problem.output_height, self.rows)

    @property
    def column_tiles(self) -> int:
        return blocks(self.problem.output_width, self.columns // (2 if self.pool else 1) - self.halo)

    @property
    def tiles(self) -> int:
        return max(1, self.problem.batch) * self.row_tiles * self.column_tiles

    def conv_rows(self, rows: int) -> int:
        return rows * (2 if self.pool else 1) + int(self.pool == 3)

    @property
    def staged_pixels(self) -> int:
        p = self.problem
        rows = (self.conv_rows(self.rows) - 1) * p.stride[0] + p.filter_height
        columns = (self.columns - 1) * p.stride[1] + 4 * blocks(p.filter_width, 4)
        return rows * 2 * blocks(columns, 2)

    def constants(self) -> dict[str, Constant]:
        """What kernels/stem/staged.cuh leaves open."""
        p = self.problem
        return {
            **self.column_constants(),
            "STRIDE_H": p.stride[0],
            "STRIDE_W": p.stride[1],
            "TILE_ROWS": self.rows,
        }

    def column_constants(self) -> dict[str, Constant]:
        """What kernels/stem/tile.cuh leaves open, and the filter."""
        p = self.problem
        return {
            **arguments.image_constants(p),
            "FILTER_HEIGHT": p.filter_height,
            "FILTER_WIDTH": p.filter_width,
            "FILTERS": p.filters,
            "POOL": self.pool,
            "COLUMNS": self.columns,
            "HALO": self.halo,
            "MASK_COLUMNS": self.pool == 3 and (bool(self.halo) or p.conv_width % 2 == 1),
        }

    def clocks(self, busy: float, alone: float, sharing: int, card: Card) -> float:
        """How long, about, the busiest multiprocessor takes.

        A tile keeps its tensor cores `busy`, and takes `alone` if no other is there; `sharing` tiles can be.
        """
        each = blocks(self.tiles, card.multiprocessors)
        return max(each * busy, blocks(each, min(each, sharing)) * alone)


@dataclass(frozen=True)
class WarpConfig(Config):
    """The config of a rung with mma.sync: warps of 16 or 32 filters, each with a band of rows."""

    bands: int
    band_rows: int
    """Rows of y."""
    column_blocks: int
    """Blocks of 8 columns of the convolution that a warp has sums for at once."""
    segments: int
    """How many times the columns of a warp make the width of a tile."""
    blocks_per_sm: int
    """What the compiler fits the registers to."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.bands * self.band_rows, self.segments * self.column_blocks * 8)

    def warps(self, problem: StemProblem) -> int:
        return self.bands * problem.filters // (16 * warp_blocks(problem))

    def shared_bytes(self, problem: StemProblem) -> int:
        tiling = self.tiling(problem)
        edges = self.warps(problem) * tiling.conv_rows(self.band_rows) * 8 * warp_blocks(problem) * 4
        return tiling.staged_pixels * PIXEL_BYTES + (edges if self.segments > 1 else 0)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """A multiprocessor starts an mma every 1.65 clocks at best, a warp alone every 12."""
        tiling = self.tiling(problem)
        warp_products = (
            tiling.conv_rows(self.band_rows)
            * self.segments
            * self.column_blocks
            * warp_blocks(problem)
            * filter_steps(problem)
        )
        rows = tiling.conv_rows(self.band_rows) * self.segments
        busy = 1.65 * warp_products * self.warps(problem) + tiling.staged_pixels / 8
        alone = max(12.0 * warp_products, busy) + rows * (100 + 30 * self.column_blocks) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.blocks_with(self.shared_bytes(problem)))
        return tiling.clocks(busy, alone, sharing, card)


def warp_blocks(problem: StemProblem) -> int:
    """Blocks of 16 filters a warp: their weights are in its registers, 4 for each step and block."""
    return 2 if problem.filters % 32 == 0 and filter_steps(problem) <= 16 else 1


def warp_configs(problem: StemProblem, card: Card) -> tuple[WarpConfig, ...]:
    """The valid configs, best first."""
    filter_warps = problem.filters // (16 * warp_blocks(problem))
    found = []
    for bands, band_rows, column_blocks, segments in product((1, 2, 4), (1, 2, 4, 7), (2, 4, 7), (1, 2, 4)):
        registers = 8 * blocks((4 * filter_steps(problem) + 5 * column_blocks) * warp_blocks(problem) + 64, 8)
        warps = filter_warps * bands
        if warps > 8 or (warps < 4 and bands < 4) or registers > (256 if segments > 1 else 240):
            continue  # the last few registers suffice only where the compiler keeps the loop over segments
        if segments > 1 and (segments - 1) * column_blocks * 8 >= problem.conv_width:
            continue
        config = WarpConfig(
            bands, band_rows, column_blocks, segments, max(1, card.registers // (32 * registers * warps))
        )
        if config.shared_bytes(problem) <= LEAST_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


@dataclass(frozen=True)
class WarpgroupConfig(Config):
    """The config of a rung with wgmma: a warpgroup of 64 filters."""

    rows: int
    """Rows of y."""
    columns: int
    """Columns of the convolution: those of one wgmma."""
    blocks_per_sm: int
    """What the compiler fits the registers to."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.rows, self.columns)

    def shared_bytes(self, problem: StemProblem) -> int:
        """The windows of a wgmma are 16 bytes apart and 32 long. compute-sanitizer takes the operand for one piece in
        which they do not overlap; with room for that behind the last row, it has nothing to report.
        """
        return self.tiling(problem).staged_pixels * PIXEL_BYTES + 16 * (self.columns - 1)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """A step takes columns / 2 clocks, 32 at least; what follows a row is hidden by other blocks only."""
        tiling = self.tiling(problem)
        rows = tiling.conv_rows(self.rows)
        busy = rows * filter_steps(problem) * max(self.columns / 2, 24.0) + tiling.staged_pixels / 8
        alone = busy + rows * (150 + 2.5 * self.columns) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.blocks_with(self.shared_bytes(problem)))
        groups = problem.filters // 64
        return groups * tiling.clocks(busy, alone, sharing, card)


WARPGROUP_COLUMNS = (32, 64, 112, 128)
"""Columns for which kernels/common/hopper.cuh has instructions."""


def warpgroup_configs(problem: StemProblem, card: Card) -> tuple[WarpgroupConfig, ...]:
    found = []
    for rows, columns in product((1, 2, 4, 7, 8, 14), WARPGROUP_COLUMNS):
        registers = 8 * blocks(4 * filter_steps(problem) + columns // 2 + columns // 8 + 40, 8)
        config = WarpgroupConfig(rows, columns, min(8, card.registers // (128 * registers)))
        if config.shared_bytes(problem) <= card.shared_bytes - BLOCK_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


def dense_steps(problem: StemProblem) -> int:
    """Steps of the product in the order of kernels/stem/dense.cuh: a slot for every two taps but the first."""
    return problem.filter_height * (problem.filter_width // 2) // 2 + 1


STREAMS = 2
"""Streams of a block: for each of them a warpgroup converts and one multiplies."""
STREAM_START_CLOCKS = 4000
"""An estimate of how long a block takes until its first row can be multiplied, and after its last."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    """The config of a rung with wgmma whose blocks stay, and walk down the rows."""

    columns: int
    """Columns of the convolution: those of one wgmma."""
    stages: int
    """Pairs of rows of the image that a stream has room for; a window sees half of the filter's height."""

    def tiling(self, problem: StemProblem) -> Tiling:
        """Tiles as high as the image."""
        return Tiling(problem, max(1, problem.output_height), self.columns)

    def blocks(self, problem: StemProblem, card: Card) -> int:
        """One a multiprocessor, and a row of y at least for each."""
        return max(1, min(self._rows(problem), card.multiprocessors // (problem.filters // 64)))

    def shared_bytes(self, problem: StemProblem) -> int:
        """The stages, two rows of slots of 16 bytes and the windows' corners in each, and their barriers."""
        slots = self.columns + problem.filter_width // 2 - 1
        stage = 1024 * blocks((2 * slots + self.columns) * 16, 1024)
        return STREAMS * self.stages * (stage + 16)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """A step takes columns / 2 clocks, 24 at least, and a row is pooled while the other stream multiplies."""
        tiling = self.tiling(problem)
        rows = ceil_div(self._rows(problem), self.blocks(problem, card))
        streams = min(STREAMS, rows)
        row = dense_steps(problem) * max(self.columns / 2, 24.0) + 30
        return streams * tiling.conv_rows(blocks(rows, STREAMS)) * row + STREAM_START_CLOCKS

    def _rows(self, problem: StemProblem) -> int:
        """Rows of y, in all columns of tiles of all images."""
        return problem.batch * self.tiling(problem).column_tiles * problem.output_height


def streamed_configs(problem: StemProblem, card: Card) -> tuple[StreamedConfig, ...]:
    found = [StreamedConfig(columns, stages) for columns, stages in product((112, 64, 32), (12, 16, 8))]
    valid = [config for config in found if config.shared_bytes(problem) <= card.shared_bytes]
    return tuple(sorted(valid, key=lambda config: config.cost(problem, card)))
