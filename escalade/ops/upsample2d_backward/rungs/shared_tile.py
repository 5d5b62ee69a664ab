"""A tile of the gradient in shared memory, with the outputs and weights of its rows and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import pooling
from escalade.ops.upsample2d.rungs.arguments import constants
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

STATIC_SHARED_BYTES = 48 * 1024
PLANES = (8, 1)
"""Planes per CTA: the outputs and weights of a tile are found once for all of them."""
STAGED_COST, SUMMED_COST = 12, 50
"""Estimates of the instructions per element that is staged, and per pixel that is summed."""
SECTOR = 8
"""Elements that a row of the tile costs besides its own, as it begins anywhere in a sector of memory."""
_WORD_BYTES = 4
_TILES = ((16, 16), (8, 32), (4, 32), (8, 16), (8, 8), (4, 8), (1, 32))


@dataclass(frozen=True)
class TileConfig(Config):
    """The tile of dx that a CTA computes, one pixel per thread, and the planes that it computes it of."""

    rows: int
    columns: int
    planes: int

    @property
    def threads(self) -> int:
        return self.rows * self.columns

    def staged(self, problem: Upsample2dBackwardProblem) -> tuple[int, int]:
        """Rows and columns of dy in shared memory."""
        return problem.most_outputs_of(self.rows, self.columns)

    def most_weights(self, problem: Upsample2dBackwardProblem) -> tuple[int, int]:
        """Weights per row and per column; those of the nearest pixel are 1 and take no memory to speak of."""
        return problem.most_outputs if problem.forward.taps > 1 else (1, 1)

    def shared_bytes(self, problem: Upsample2dBackwardProblem) -> int:
        down, along = self.most_weights(problem)
        found = self.rows * (2 + down) + self.columns * (2 + along)
        return _WORD_BYTES * (math.prod(self.staged(problem)) + found)

    def blocks(self, problem: Upsample2dBackwardProblem) -> int:
        f = problem.forward
        planes = blocks(f.batch * f.channels, self.planes)
        return planes * blocks(f.height, self.rows) * blocks(f.width, self.columns)

    def cost(self, problem: Upsample2dBackwardProblem) -> int:
        """About proportional to the time, of tiles with as many planes: pixels past the edges cost as others do."""
        rows, columns = self.staged(problem)
        staged = STAGED_COST * rows * (columns + SECTOR)
        return self.blocks(problem) * (staged + SUMMED_COST * self.threads)


class SharedTile(Rung[Upsample2dBackwardProblem]):
    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nchw":
            return f"{self.name} takes layout nchw, not {f.layout}"
        fitting = self._fitting(problem)
        if not fitting:
            return (
                f"{self.name} keeps the outputs of a tile of pixels in {STATIC_SHARED_BYTES // 1024} KB of shared "
                f"memory, which those of {problem.name} exceed; per_pixel takes any"
            )
        if max(tile.blocks(problem) for tile in fitting) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: Upsample2dBackwardProblem) -> tuple[Config, ...]:
        """Several planes per CTA unless CTAs are then too few for the card, and the cheapest tiles first."""

        def order(tile: TileConfig) -> tuple[bool, int, int]:
            idle = tile.planes > 1 and tile.blocks(problem) < self.card.filling
            return idle, -tile.planes, tile.cost(problem)

        return tuple(sorted(self._fitting(problem), key=order))

    def _fitting(self, problem: Upsample2dBackwardProblem) -> list[TileConfig]:
        tiles = (TileConfig(*tile, planes) for planes in PLANES for tile in _TILES)
        return [tile for tile in tiles if tile.shared_bytes(problem) <= STATIC_SHARED_BYTES]

    def recipe(self, problem: Upsample2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, TileConfig)
        f = problem.forward
        (output_rows, output_columns), (down, along) = config.staged(problem), config.most_weights(problem)
        sizes = {
            "TILE_ROWS": config.rows,
            "TILE_COLUMNS": config.columns,
            "PLANES": config.planes,
            "OUTPUT_ROWS": output_rows,
            "OUTPUT_COLUMNS": output_columns,
            "MOST_ROWS": down,
            "MOST_COLUMNS": along,
        }
        call = KernelCall(
            Program.of(
                "upsample2d_backward/shared_tile.cu",
                "upsample2d_backward_shared_tile",
                constants(f) | sizes,
            ),
            (config.blocks(problem), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps),
            overlap=True,
        )
        return Recipe((call,))


# Prediction for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp32: 336 MB, 77 us.
SHARED_TILE = SharedTile(
    "shared_tile",
    "the gradients of a tile are staged in shared memory, the outputs and weights of its rows and columns found once",
    below="per_pixel",
    # per_pixel: 300 instructions per pixel, most of them to find its outputs, 300 us. Without these about 120 are left:
    # 48 for four staged elements, 50 for the sum. Nearest outputs are read by one pixel each, so that staging saves no
    # reads here.
    predicted_gain=2.5,
)
