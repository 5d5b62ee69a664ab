"""Input gradients on CUDA cores: atomics, one thread per element of dx, and that with shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config, ThreadsConfig
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung
from escalade.ops.shared import activation

_SUMS = "sums"
_FP32_BYTES = 4


@dataclass(frozen=True)
class Atomics(InputGradientRung[ThreadsConfig]):
    dtypes: tuple[str, ...] = ("fp32",)
    takes_groups = True

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: Conv2dInputGradientProblem, config: ThreadsConfig) -> Recipe:
        f, threads = problem.forward, config.threads
        add = KernelCall(
            Program.of("conv2d_input_gradient/atomics.cu", problem=problem),
            (blocks(f.output_elements, threads), 1, 1),
            (threads, 1, 1),
            (Buffer("gradient"), Buffer("weight"), Buffer(_SUMS), arguments.shape(f)),
            overlap=True,
        )  # fmt: skip
        finish = KernelCall(
            Program.of(
                "conv2d_input_gradient/atomics_finish.cu", constants=activation.constants_of(f), problem=problem
            ),
            (blocks(problem.elements, threads), 1, 1),
            (threads, 1, 1),
            (
                Buffer(_SUMS), Buffer(problem.aux, optional=True), Buffer("bias", optional=True), Buffer("y"),
                arguments.shape(f),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((add, finish), (Workspace(_SUMS, _FP32_BYTES * problem.elements, zeroed=True),))


ATOMICS = Atomics(
    "atomics",
    "one thread per element of dy adds to every element of dx in its window; not deterministic",
    None,
    None,
)


@dataclass(frozen=True)
class Direct(InputGradientRung[ThreadsConfig]):
    last_resort = True
    takes_groups = True

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Conv2dInputGradientProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            Program.of(
                "conv2d_input_gradient/direct.cu",
                constants=activation.constants_of(problem.forward),
                problem=problem,
            ),
            blocks(problem.elements, config.threads),
            config.threads,
            Buffer("gradient"),
            Buffer("weight"),
            Buffer(problem.aux, optional=True),
            Buffer("bias", optional=True),
            Buffer("y"),
            arguments.shape(problem.forward),
        )


# Prediction for 128to128_28_k3 at batch 256, 30 G products.
DIRECT = Direct(
    "direct",
    "one thread per element of dx, which gathers all its terms from global memory",
    below="atomics",
    # atomics: 160 G per second in L2, 185 ms. Two loads per multiply-add reach about 2 TFLOP/s, 30 ms.
    predicted_gain=6.2,
)


STATIC_SHARED_BYTES = 48 * 1024
MOST_CHUNK = 8
"""Filters per stage: the products of a tap with all of them are unrolled."""
STAGED_COST = 8
"""Estimated cost of staging an element, in multiply-adds: an index into a tensor with bounds checks."""
SEVERAL_ROWS_COST = 1.5
"""Cost of a product for a warp with pixels of several rows: in shared memory, these rows are in the same banks."""
WARP = 32
_FP32_BYTES = 4
_TILES = {
    "nchw": ((4, 32, 2), (2, 32, 4), (4, 32, 4), (8, 16, 2), (4, 16, 4), (8, 16, 4), (8, 8, 4), (8, 8, 8)),
    "nhwc": ((2, 4, 32), (4, 4, 32), (2, 8, 32), (4, 4, 16), (4, 8, 8), (8, 8, 4)),
}
"""Rows, columns and channels. Warps have neighbors in the layout's innermost dimension. 512 threads at most: then an SM
has several CTAs, and some multiply while others stage."""


@dataclass(frozen=True)
class TileConfig(Config):
    """The tile of dx that a CTA computes."""

    rows: int
    columns: int
    channels: int
    chunk: int
    """Filters staged at a time."""

    @property
    def threads(self) -> int:
        return self.rows * self.columns * self.channels

    def met(self, forward: Conv2dProblem) -> int:
        """Pixels of dy that a tile meets: `MET_PIXELS` of the kernel."""
        f = forward
        rows = (self.rows - 1 + f.reach[0]) // f.stride[0] + 1
        return rows * ((self.columns - 1 + f.reach[1]) // f.stride[1] + 1)

    def staged(self, forward: Conv2dProblem) -> int:
        """Elements in shared memory."""
        return self.chunk * (self.met(forward) + self.channels * forward.taps)

    def fits(self, forward: Conv2dProblem) -> bool:
        return self.staged(forward) * _FP32_BYTES <= STATIC_SHARED_BYTES

    def blocks(self, forward: Conv2dProblem) -> int:
        f = forward
        pixels = ceil_div(f.height, self.rows) * ceil_div(f.width, self.columns)
        return f.batch * pixels * ceil_div(f.channels, self.channels)

    def cost(self, forward: Conv2dProblem) -> float:
        """Cost roughly proportional to time: products, including those past the edges, and staging."""
        products = self.chunk * self.threads * forward.taps * self._turns(forward)
        chunks = ceil_div(forward.filters, self.chunk)
        return self.blocks(forward) * chunks * (products + STAGED_COST * self.staged(forward))

    def _turns(self, forward: Conv2dProblem) -> float:
        """The cost of a tap, on average. A warp skips a tap that the stride keeps from all its pixels: it has one pixel
        in NHWC and one row of them in NCHW, unless the tile is too narrow."""
        f = forward
        if f.layout == "nhwc":
            return 1 / math.prod(f.stride) if self.channels % WARP == 0 else 1.0
        return 1 / f.stride[0] if self.columns % WARP == 0 else SEVERAL_ROWS_COST


def _tiles(forward: Conv2dProblem) -> tuple[TileConfig, ...]:
    """Return the tiles that fit into shared memory, each with the largest chunk that fits, cheapest first."""
    found = []
    for tile in _TILES[forward.layout]:
        chunk = min(MOST_CHUNK, forward.filters)
        while chunk > 1 and not TileConfig(*tile, chunk).fits(forward):
            chunk //= 2
        found.append(TileConfig(*tile, chunk))
    return tuple(sorted((tile for tile in found if tile.fits(forward)), key=lambda tile: tile.cost(forward)))


@dataclass(frozen=True)
class SharedTile(InputGradientRung[TileConfig]):
    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        tiles = _tiles(f)
        if not tiles:
            return (
                f"{self.name} stages all taps of a filter in {STATIC_SHARED_BYTES // 1024} KB of shared memory; "
                f"those of {problem.name} do not fit, direct takes any"
            )
        if max(tile.blocks(f) for tile in tiles) >= 2**31:
            return f"{self.name} counts tiles in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[TileConfig, ...]:
        return _tiles(problem.forward)

    def recipe(self, problem: Conv2dInputGradientProblem, config: TileConfig) -> Recipe:
        f = problem.forward
        return launch(
            Program.of(
                "conv2d_input_gradient/shared_tile.cu",
                constants=activation.constants_of(problem.forward),
                problem=problem,
                forward=f,
                config=config,
            ),
            config.blocks(f),
            config.threads,
            Buffer("gradient"),
            Buffer("weight"),
            Buffer(problem.aux, optional=True),
            Buffer("bias", optional=True),
            Buffer("y"),
            arguments.shape(f),
        )


# Prediction for 128to128_28_k3 at batch 256 in NCHW, 30 G products.
SHARED_TILE = SharedTile(
    "shared_tile",
    "a CTA stages the gradients that a tile of dx meets, and the weights, in shared memory",
    below="direct",
    # direct reads both operands of a product from global memory through L1 and computes their addresses: 30 ms. Shared
    # memory serves 32 lanes per cycle and SM: two loads per product are 8 ms. A tile of 32 columns on 28 adds 14%,
    # staging with its barriers an estimated 20%: 11 ms.
    predicted_gain=2.7,
)
