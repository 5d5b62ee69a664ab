"""The sums of a tile of pixels in shared memory, to which windows add."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.max_pool2d.rungs.naive import windows
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import constants
from escalade.ops.shared import pooling


@dataclass(frozen=True)
class SumsConfig(Config):
    rows: int
    columns: int
    """Pixels of a tile."""
    threads: int = 128

    def tiles(self, problem: MaxPool2dBackwardProblem) -> tuple[int, int]:
        f = problem.forward
        return blocks(f.height, self.rows), blocks(f.width, self.columns)

    def grid(self, problem: MaxPool2dBackwardProblem) -> int:
        rows, columns = self.tiles(problem)
        return max(1, problem.forward.batch * problem.forward.channels * rows * columns)


_TILES = tuple(
    SumsConfig(rows, columns) for rows, columns in ((16, 32), (32, 32), (8, 32), (16, 64), (8, 16))
)


class SharedSums(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if max(tile.grid(problem) for tile in _TILES) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        """The least pixels of tiles first, those outside the image among them."""
        return tuple(sorted(_TILES, key=lambda tile: tile.grid(problem) * tile.rows * tile.columns))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, SumsConfig)
        tile: dict[str, Constant] = {"TILE_ROWS": config.rows, "TILE_COLUMNS": config.columns}
        found = Buffer("x", optional=True), Buffer("places", optional=True)
        f = problem.forward
        call = KernelCall(
            Program.of(
                "max_pool2d_backward/shared_sums.cu",
                "max_pool2d_backward_shared_sums",
                constants(problem) | tile,
            ),
            (config.grid(problem), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), *found, Buffer("y"), pooling.shape(f), windows(f), *config.tiles(problem)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB, 145 us
# by stored places.
SHARED_SUMS = SharedSums(
    "shared_sums",
    "the sums of a tile of pixels in shared memory, to which windows add: each pixel is written once; where windows "
    "overlap, not the same bits in every run",
    below="atomics",
    # Sums of 32 bits, 822 MB, are added to, read, and left at zero: 2.9 GB against 0.9.
    predicted_gain=2.5,
)
