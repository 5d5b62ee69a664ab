"""What a tile of windows sees, in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import blocks
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.shared import pooling, windowed

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


class SharedTile(Rung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if problem.dilation != (1, 1):
            return f"{self.name} takes windows without gaps, not dilation {spell_pair(problem.dilation)}"
        if problem.places:
            return f"{self.name} gives the maxima alone, not their places"
        if not self.configs(problem):
            return (
                f"{self.name} keeps what a tile of windows sees in 48 KB of shared memory, which these exceed"
            )
        if self._blocks(problem, _TILES[-2]) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        """Least waste at the edges first, then the least read twice."""
        fitting = [tile for tile in _TILES if tile.shared_bytes(problem) <= _STATIC_SHARED_BYTES]

        def cost(tile: TileConfig) -> float:
            rows, columns = tile.tiles(problem)
            return rows * columns * (tile.rows * tile.columns + tile.shared_bytes(problem))

        return tuple(sorted(fitting, key=cost))

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, TileConfig)
        constants = windowed.constants(problem) | {"TILE_ROWS": config.rows, "TILE_COLUMNS": config.columns}
        call = KernelCall(
            Program.of("max_pool2d/shared_tile.cu", "max_pool2d_shared_tile", constants),
            (self._blocks(problem, config), 1, 1),
            (config.rows * config.columns, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem), *config.tiles(problem)),
            overlap=True,
        )
        return Recipe((call,))

    def _blocks(self, problem: MaxPool2dProblem, tile: TileConfig) -> int:
        rows, columns = tile.tiles(problem)
        return max(1, problem.batch * problem.channels * rows * columns)


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
SHARED_TILE = SharedTile(
    "shared_tile",
    "what a tile of windows sees is brought into shared memory once, edges included",
    below="naive",
    # 51 million threads of 100 instructions (175 us) instead of 220 (380 us).
    predicted_gain=2.0,
)
