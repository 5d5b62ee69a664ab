"""Configs of the Winograd rungs, and their tiles, chunks, constants and grids."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.device.recipe import Ints, Workspace
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments

WEIGHTS, INPUTS, PRODUCTS = "winograd_weights", "winograd_inputs", "winograd_products"


@dataclass(frozen=True)
class StagedConfig(Config):
    """Config of the rungs that keep V and M in global memory."""

    block_tiles: int = 128
    """Tiles per CTA of the matrix product."""
    block_filters: int = 64
    """Filters per CTA of the matrix product."""
    stages: int = 3
    """Stages of 16 channels in shared memory."""
    vector: int = 2
    """Channels per thread of the transforms."""
    chunk_megabytes: int = 1024
    """Limit of V and M together; tiles are processed in chunks that fit."""
    split: bool = False
    """Three TF32 products on the tensor cores instead of one fp32 product."""

    @property
    def gemm_threads(self) -> int:
        # A warp has 32 lanes of 8x8 sums, or one block of 64x32.
        return self.block_tiles * self.block_filters // 64

    @property
    def blocks_per_sm(self) -> int:
        """CTAs per SM that fit: 128 registers per thread for the fp32 product, 168 for the split one."""
        return 65536 // ((168 if self.split else 128) * self.gemm_threads)

    @property
    def shared_bytes(self) -> int:
        pitch = self.block_tiles + (0 if self.split else 4)
        return 4 * self.stages * 16 * (pitch + self.block_filters)


@dataclass(frozen=True)
class FusedConfig(Config):
    """Config of the fused kernel."""

    warp_points: int
    """Points per warp."""
    block_filters: int

    def threads(self, points: int) -> int:
        return 32 * (points // self.warp_points) + 128

    def shared_bytes(self, points: int) -> int:
        """Bytes of two stages of V and U, of four channels each."""
        return 4 * 2 * points * 4 * (40 + self.block_filters)


@dataclass(frozen=True)
class Chunk:
    """Tiles processed together."""

    first: int = 0
    count: int = 0
    room: int = 0
    """Tiles allocated in V and M: `count` rounded up to CTAs of the product."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of a problem's outputs; channels and filters are rounded up to 4 as in V, U and M."""

    tile: int
    rows: int
    columns: int
    count: int
    channels: int
    filters: int

    @staticmethod
    def of(problem: Conv2dProblem, tile: int) -> Tiles:
        rows, columns = ceil_div(problem.output_height, tile), ceil_div(problem.output_width, tile)
        return Tiles(
            tile, rows, columns, problem.batch * rows * columns,
            4 * ceil_div(problem.channels, 4), 4 * ceil_div(problem.filters, 4),
        )  # fmt: skip

    @property
    def points(self) -> int:
        return (self.tile + 2) ** 2

    def grid(self, chunk: Chunk) -> Ints:
        """`TileGrid` of kernels/common/winograd.cuh."""
        return Ints((self.rows, self.columns, chunk.first, chunk.count, chunk.room))

    def chunks(self, config: StagedConfig) -> tuple[Chunk, ...]:
        """Return as few chunks as fit, of equal size except for the last."""
        tile_bytes = 4 * self.points * (self.channels + self.filters)
        most = max(1, config.chunk_megabytes * 2**20 // (tile_bytes * config.block_tiles))
        blocks = ceil_div(self.count, config.block_tiles)
        size = ceil_div(blocks, ceil_div(blocks, most)) * config.block_tiles
        counts = ((first, min(size, self.count - first)) for first in range(0, self.count, size))
        return tuple(
            Chunk(first, count, ceil_div(count, config.block_tiles) * config.block_tiles)
            for first, count in counts
        )

    def workspaces(self, room: int, copies: int) -> tuple[Workspace, ...]:
        """Return workspaces for U, and for `copies` of V and M with `room` tiles."""
        plane = 4 * self.points * room * copies
        return (
            Workspace(WEIGHTS, 4 * self.points * self.channels * self.filters),
            Workspace(INPUTS, plane * self.channels),
            Workspace(PRODUCTS, plane * self.filters),
        )


def _lanes(problem: Conv2dProblem, groups: int) -> int:
    """Return the threads along channels: all that have work in NHWC, one 32-byte sector in NCHW."""
    return min(32 if problem.layout == "nhwc" else 4, 1 << (groups - 1).bit_length())


def transform_constants(
    problem: Conv2dProblem, config: StagedConfig, tiles: Tiles, threads: int
) -> dict[str, Constant]:
    return {
        "Element": element(problem.dtype),
        "NHWC": problem.layout == "nhwc",
        "TILE": tiles.tile,
        "STAGE_THREADS": threads,
        "VECTOR": config.vector,
        "INPUT_LANES": _lanes(problem, tiles.channels // config.vector),
        "OUTPUT_LANES": _lanes(problem, tiles.filters // config.vector),
        "WHOLE_CHANNELS": problem.channels % config.vector == 0,
        "WHOLE_FILTERS": problem.filters % config.vector == 0,
        **arguments.epilogue_constants(problem),
    }


def transform_blocks(constants: dict[str, Constant], lanes: str, width: int, tiles: int) -> tuple[int, int]:
    """Return the CTAs of a transform, and the CTAs that cover the channels of one tile."""
    threads, vector, along = constants["STAGE_THREADS"], constants["VECTOR"], constants[lanes]
    assert isinstance(threads, int) and isinstance(vector, int) and isinstance(along, int)
    across = ceil_div(width, along * vector)
    return across * ceil_div(tiles, threads // along), across


def gemm_constants(config: StagedConfig) -> dict[str, Constant]:
    return {
        "BLOCK_TILES": config.block_tiles,
        "BLOCK_FILTERS": config.block_filters,
        "STAGES": config.stages,
        "SPLIT": config.split,
        "GEMM_THREADS": config.gemm_threads,
        "BLOCKS_PER_SM": config.blocks_per_sm,
    }


def gemm(config: StagedConfig, tiles: Tiles, chunk: Chunk) -> tuple[int, Ints]:
    """Return the CTAs of the matrix products, and `GemmShape` of kernels/conv2d/winograd_gemm.cuh."""
    tile_blocks, filter_blocks = (
        chunk.room // config.block_tiles,
        ceil_div(tiles.filters, config.block_filters),
    )
    shape = Ints((tiles.channels, tiles.filters, tile_blocks, filter_blocks))
    return tiles.points * tile_blocks * filter_blocks, shape
