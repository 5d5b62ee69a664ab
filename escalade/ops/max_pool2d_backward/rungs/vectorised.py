"""Sixteen bytes of channels a thread, for a tile of pixels."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.rung import Config, Rung
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import constants
from escalade.ops.shared import pooling, windowed

MOST_WINDOWS = 9
"""Windows that reach into a tile: the gradient and the places of each take up to six registers."""
MOST_PIXELS = 64
"""Pixels of a tile: the code has no loop over them."""
MOST_TAPS = 81
"""Taps of all windows of a tile that are found in x: the code has no loop over them."""


@dataclass(frozen=True)
class TileConfig(Config):
    rows: int
    columns: int
    """Windows that begin in a tile."""
    threads: int = 128

    def windows(self, f: MaxPool2dProblem) -> int:
        """Windows that begin in a tile, or in front of it and reach into it."""
        down, along = ((kernel - 1) // stride for kernel, stride in zip(f.kernel, f.stride, strict=True))
        return (self.rows + down) * (self.columns + along)

    def pixels(self, f: MaxPool2dProblem) -> tuple[int, int]:
        return self.rows * f.stride[0], self.columns * f.stride[1]

    def tiles(self, f: MaxPool2dProblem) -> tuple[int, int]:
        """Tiles down and along the image with the padding in front of it."""
        rows, columns = self.pixels(f)
        return ceil_div(f.height + f.padding[0], rows), ceil_div(f.width + f.padding[1], columns)

    def threads_for(self, f: MaxPool2dProblem) -> int:
        down, along = self.tiles(f)
        return f.batch * down * along * (f.channels // widest_vector(f.dtype, f.channels))

    def fits(self, problem: MaxPool2dBackwardProblem) -> bool:
        f = problem.forward
        rows, columns = self.pixels(f)
        windows = self.windows(f)
        taps = 0 if problem.stored else windows * f.kernel[0] * f.kernel[1]
        return windows <= MOST_WINDOWS and rows * columns <= MOST_PIXELS and taps <= MOST_TAPS


TILES = tuple(TileConfig(rows, columns) for rows, columns in ((1, 1), (1, 2), (2, 2)))


class Vectorised(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.dilation != (1, 1):
            return f"{self.name} takes windows without gaps, not dilation {spell_pair(f.dilation)}"
        if not TILES[0].fits(problem):
            return (
                f"{self.name} takes up to {MOST_WINDOWS} windows that see a pixel, strides of up to {MOST_PIXELS} "
                f"pixels, and where it reads x {MOST_TAPS} taps"
            )
        if TILES[0].threads_for(f) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        """The smallest first: registers for more windows cost more threads than overlaps save loads."""
        return tuple(tile for tile in TILES if tile.fits(problem))

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, TileConfig)
        f = problem.forward
        tile = {
            "VECTOR": widest_vector(f.dtype, f.channels),
            "TILE_ROWS": config.rows,
            "TILE_COLUMNS": config.columns,
        }
        call = KernelCall(
            Program.of(
                "max_pool2d_backward/vectorised.cu", "max_pool2d_backward_vectorised",
                windowed.constants(f) | constants(problem) | tile,
            ),
            (blocks(config.threads_for(f), config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("gradient"), Buffer("x", optional=True), Buffer("places", optional=True), Buffer("y"),
                pooling.shape(f), *config.tiles(f),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us; 617 MB, 145 us
# by stored places.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, for a tile of pixels whose windows are looked at once",
    below=("gathered", "stored"),
    # By stored places 160 us, a tenth more than the rate of memory, against 1.1 ms. In x the comparisons of two windows
    # a pixel, 300 us, against 2.9 ms.
    predicted_gain=7.0,
)
