"""The ladder of max_pool2d."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d import reference
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.shared import pooling
from escalade.ops.shared.images import LAYOUTS

BUSY_THREADS = 4 * 2048
"""Threads a multiprocessor that fill it four times."""
_STATIC_SHARED_BYTES = 48 * 1024


def _constants(problem: MaxPool2dProblem) -> dict[str, Constant]:
    p = problem
    return {
        "Element": element(p.dtype),
        "KERNEL_H": p.kernel[0],
        "KERNEL_W": p.kernel[1],
        "STRIDE_H": p.stride[0],
        "STRIDE_W": p.stride[1],
        "PAD_H": p.padding[0],
        "PAD_W": p.padding[1],
    }


class Naive(Rung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        return None

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {"Element": element(p.dtype), "NHWC": p.layout == "nhwc"}
        call = KernelCall(
            Program.of("max_pool2d/naive.cu", "max_pool2d_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p), Ints((*p.kernel, *p.stride, *p.padding))),
            overlap=True,
        )
        return Recipe((call,))


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
        if not self.configs(problem):
            return (
                f"{self.name} keeps what a tile of windows sees in 48 KB of shared memory, which these exceed"
            )
        if self._blocks(problem, _TILES[-2]) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        """Least waste at the edges first, then the least read twice."""
        fitting = [tile for tile in _TILES if tile.shared_bytes(problem) <= _STATIC_SHARED_BYTES]

        def cost(tile: TileConfig) -> float:
            rows, columns = tile.tiles(problem)
            return rows * columns * (tile.rows * tile.columns + tile.shared_bytes(problem))

        return tuple(sorted(fitting, key=cost))

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, TileConfig)
        constants = _constants(problem) | {"TILE_ROWS": config.rows, "TILE_COLUMNS": config.columns}
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


@dataclass(frozen=True)
class RunConfig(Config):
    rows: int
    columns: int
    """Outputs that a thread takes."""
    threads: int = 128

    def threads_for(self, problem: MaxPool2dProblem) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.output_height, self.rows) * blocks(p.output_width, self.columns) * vectors

    def loads(self, problem: MaxPool2dProblem) -> tuple[int, int]:
        """Pixels in a row that a thread loads at once, and in all rows."""
        p = problem
        columns = (self.columns - 1) * p.stride[1] + p.kernel[1]
        return columns, columns * ((self.rows - 1) * p.stride[0] + p.kernel[0])


_RUNS = tuple(RunConfig(rows, columns) for rows, columns in ((2, 2), (1, 1), (1, 2), (1, 4), (2, 4)))
MOST_LOADS_IN_ROW = 11
"""Four registers each: what fits beside the results."""
MOST_LOADS = 81
"""Loads of a window at most: the code has no loop over them."""


class Vectorised(Rung[MaxPool2dProblem]):
    def supports(self, problem: MaxPool2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if not self.configs(problem):
            return f"{self.name} takes windows of up to {MOST_LOADS_IN_ROW} columns and {MOST_LOADS} pixels in all"
        if RunConfig(1, 1).threads_for(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dProblem) -> tuple[Config, ...]:
        """A square of outputs where that leaves the card busy, else one."""
        fitting = [run for run in _RUNS if self._fits(problem, run)]
        default = (
            _RUNS[0]
            if _RUNS[0].threads_for(problem) >= BUSY_THREADS * self.card.multiprocessors
            else _RUNS[1]
        )
        return tuple(sorted(fitting, key=lambda run: run != default))

    def _fits(self, problem: MaxPool2dProblem, run: RunConfig) -> bool:
        row, total = run.loads(problem)
        return row <= MOST_LOADS_IN_ROW and total <= MOST_LOADS

    def recipe(self, problem: MaxPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, RunConfig)
        constants = _constants(problem) | {
            "VECTOR": widest_vector(problem.dtype, problem.channels),
            "OUTPUT_ROWS": config.rows,
            "OUTPUT_COLUMNS": config.columns,
        }
        call = KernelCall(
            Program.of("max_pool2d/vectorised.cu", "max_pool2d_vectorised", constants),
            (blocks(config.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(problem)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 514 MB, 121 us.
RUNGS: tuple[Rung[MaxPool2dProblem], ...] = (
    Naive("naive", "one thread an output, every window read from global memory", None, None),
    SharedTile(
        "shared_tile",
        "what a tile of windows sees is brought into shared memory once, edges included",
        below="naive",
        # 51 million threads of 100 instructions (175 us) instead of 220 (380 us).
        predicted_gain=2.0,
    ),
    Vectorised(
        "vectorised",
        "16 bytes of channels a thread, for a run of outputs whose overlapping windows are read once",
        below="naive",
        # At the rate of memory, 121 us, against 380 us.
        predicted_gain=3.0,
    ),
)


def _square(
    channels: int, size: int, kernel: int, stride: int, padding: int, batch: int = 1, ceil: bool = False
) -> MaxPool2dProblem:
    return MaxPool2dProblem(
        batch, channels, size, size, (kernel, kernel), (stride, stride), (padding, padding), ceil
    )


PROBLEMS = tuple(_square(64, 112, 3, 2, 1, batch) for batch in (1, 32, 256))
"""What `escalade ladder max_pool2d` measures: ResNet's, in every dtype and layout that a rung supports."""

SMALL_PROBLEMS = (
    _square(16, 13, 3, 2, 1, batch=2),
    _square(8, 10, 2, 2, 0),
    _square(12, 9, 3, 1, 1),
    _square(3, 11, 3, 2, 0, batch=2, ceil=True),
    _square(5, 6, 2, 3, 1, ceil=True),
    MaxPool2dProblem(1, 24, 7, 37, (3, 5), (2, 3), (1, 2)),
    MaxPool2dProblem(2, 8, 2, 5, (3, 1), (2, 1), ceil_mode=True),
    _square(8, 14, 12, 4, 6),
    _square(1, 1, 1, 1, 0),
)
"""Small problems that between them have windows that overlap, touch and leave gaps, both roundings, kernels that are
not square, odd sizes."""


class MaxPool2d(Operation[MaxPool2dProblem]):
    name = "max_pool2d"
    problem = MaxPool2dProblem
    in_pytorch = reference
    ladder = Ladder("max_pool2d", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: MaxPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "shared_tile", "naive")


MAX_POOL2D = MaxPool2d()
