"""Configs of the Winograd rungs, and their tiles, chunks, constants and grids."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Ints, Workspace
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation

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


@dataclass(frozen=True)
class TransformStages:
    """The transforms of V and M (kernels/conv2d/winograd_stages.cuh), in CTAs of `threads`."""

    problem: Conv2dProblem
    config: StagedConfig
    tiles: Tiles
    threads: int

    def _lanes(self, width: int) -> int:
        """Return the threads along channels: all that have work in NHWC, one 32-byte sector in NCHW."""
        most = 32 if self.problem.layout == "nhwc" else 4
        return min(most, 1 << (width // self.config.vector - 1).bit_length())

    @property
    def input_lanes(self) -> int:
        return self._lanes(self.tiles.channels)

    @property
    def output_lanes(self) -> int:
        return self._lanes(self.tiles.filters)

    def program(self, source: str) -> Program:
        return Program.of(
            source,
            constants=activation.constants_of(self.problem),
            problem=self.problem,
            config=self.config,
            tiles=self.tiles,
            threads=self.threads,
            input_lanes=self.input_lanes,
            output_lanes=self.output_lanes,
        )

    def blocks(self, lanes: int, width: int, tiles: int) -> tuple[int, int]:
        """Return the CTAs of a transform, and the CTAs that cover the channels of one tile."""
        across = ceil_div(width, lanes * self.config.vector)
        return across * ceil_div(tiles, self.threads // lanes), across


def gemm(config: StagedConfig, tiles: Tiles, chunk: Chunk) -> tuple[int, Ints]:
    """Return the CTAs of the matrix products, and `GemmShape` of kernels/conv2d/winograd_gemm.cuh."""
    tile_blocks, filter_blocks = (
        chunk.room // config.block_tiles,
        ceil_div(tiles.filters, config.block_filters),
    )
    shape = Ints((tiles.channels, tiles.filters, tile_blocks, filter_blocks))
    return tiles.points * tile_blocks * filter_blocks, shape
