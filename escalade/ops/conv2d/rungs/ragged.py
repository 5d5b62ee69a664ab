"""Channels that are no multiple of 16 bytes, or few filters: windows in shared memory, stored pixel by pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung, fitting_blocks, portable_first
from escalade.ops.shared import activation

WARPS = 4
LANE_BYTES, STEP_BYTES = 8, 32
"""Bytes of an output pixel's inputs per lane and MMA step, and of all lanes together."""
BLOCK_N = 8
"""N of an mma.sync."""
MOST_BLOCKS_N = 12
"""Largest number of filter blocks per warp."""
SUMS = 64
"""Accumulator registers per thread."""
MOST_STEPS = 32
"""Largest number of MMA steps per segment; all are unrolled."""
MOST_CONFIGS = 12
FEW_FILTERS = 32
"""Up to this many filters any number of channels is supported: rungs that fetch a pixel per tap are slow there."""
SPLIT_OPERANDS = 40
"""Extra registers per thread to split operands: both parts of those in flight."""
BANKS = 32
GAP_BYTES = 32
"""Padding per pixel whose channels fill whole or half cache lines: four pixels then cover all banks."""

PRODUCT_CLOCKS = 2.0
"""Clocks per SM for an mma.sync of 16x8x16, or of 16x8x8 in TF32."""
COPY_CLOCKS = 3.0
"""Clocks per SM for a warp to copy one unit per lane: addresses, load and store (a guess)."""
STORE_CLOCKS = 6.0
"""Clocks per SM for a warp to stage, finish and store two results per lane (a guess)."""
TILE_CLOCKS = 2500.0
"""Clocks per tile that a CTA waits for its window and first weights, hidden by others."""

STEP_CLOCKS, STEP_CLOCKS_BLOCK = 60.0, 90.0
"""Clocks per step of a warp without prefetch: fixed, and per 16-pixel block. Fitted on 32 filters over 128 channels
with 3x3 taps on an H200."""

MEASURED = 1.7
"""Measured / modeled clocks: 1.6 for 256to32_28 and 192to32_35, 2.4 for 32to32_149_k3."""


@dataclass(frozen=True)
class RaggedConfig(Config):
    rows: int
    columns: int
    tiles_m: int
    """16-pixel blocks per warp."""
    tiles_n: int
    """8-filter blocks per warp."""
    blocks_per_sm: int = 1


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    config: RaggedConfig

    @property
    def filter_blocks(self) -> int:
        """CTAs along the filters."""
        return ceil_div(self.problem.filters, BLOCK_N * self.config.tiles_n)

    @property
    def tiles(self) -> int:
        p, c = self.problem, self.config
        return p.batch * ceil_div(p.output_height, c.rows) * ceil_div(p.output_width, c.columns)

    @property
    def window(self) -> int:
        """Bytes of the window of a tile."""
        p, c = self.problem, self.config
        rows, columns = p.window(c.rows, c.columns)
        return rows * columns * (p.channels * p.element_bytes + _gap_bytes(p))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the window, which the accumulators overwrite."""
        c = self.config
        pitch = c.tiles_n * BLOCK_N + (0 if c.tiles_n % 2 else BLOCK_N)
        return max(self.window, c.rows * c.columns * pitch * 4)

    @property
    def registers(self) -> int:
        """Estimated registers per thread: accumulators, both operands, addresses of pixels, and the rest."""
        m, n = self.config.tiles_m, self.config.tiles_n
        sums, operands = 4 * m * n, 4 * m + 4 * n
        if _products(self.problem) > 1:
            sums, operands = 2 * sums, 2 * operands + SPLIT_OPERANDS
        return sums + operands + 2 * m + 50

    def fitting_blocks(self, card: Card) -> int:
        """Return the CTAs per SM."""
        return max(1, min(fitting_blocks(card, WARPS * 32, self.registers, self.shared_bytes), 8))

    def clocks(self, card: Card) -> float:
        """Estimate the clocks of the busiest SM: copies, shared-memory reads and stores share one unit, which overlaps
        with products; or the latency of all steps of the CTAs of an SM."""
        p, c = self.problem, self.config
        steps = _segments(p)[0] * _steps(p)
        blocks_m = ceil_div(c.rows * c.columns, 16)
        products = steps * blocks_m * c.tiles_n * PRODUCT_CLOCKS * _products(p)
        reads = steps * blocks_m * 2 * (LANE_BYTES // _unit_bytes(p)) * _conflicts(p)
        weights = steps * WARPS * c.tiles_n * 2
        copies = self.window / _unit_bytes(p) / 32 * COPY_CLOCKS
        stores = c.rows * c.columns * c.tiles_n * 4 / 32 * STORE_CLOCKS
        if p.filters % 2:
            stores *= 1.5
        moved = copies + reads + weights + stores * (1.5 if p.residual else 1)
        tiles = ceil_div(self.tiles * self.filter_blocks, card.multiprocessors)
        together = tiles * (max(products, moved) + TILE_CLOCKS / c.blocks_per_sm)
        alone = steps * (STEP_CLOCKS + STEP_CLOCKS_BLOCK * c.tiles_m) * _products(p)
        return TILE_CLOCKS + MEASURED * max(together, ceil_div(tiles, c.blocks_per_sm) * alone)


def _products(p: Conv2dProblem) -> int:
    """Return the tensor-core products per product."""
    return 3 if p.dtype == "fp32" else 1


def _unit_bytes(p: Conv2dProblem) -> int:
    """Return the bytes per read, which divide every pixel."""
    return next(size for size in (8, 4, 2) if p.channels * p.element_bytes % size == 0)


def _gap_bytes(p: Conv2dProblem) -> int:
    """Return the padding per pixel of a window: where channels fill whole steps, four pixels shall cover all banks."""
    return GAP_BYTES if p.channels * p.element_bytes % STEP_BYTES == 0 else 0


def _segments(p: Conv2dProblem) -> tuple[int, int]:
    """Return the number of contiguous runs that an output pixel reads, and the elements of each: rows, or taps if
    columns are dilated."""
    if p.dilation[1] == 1 and not _gap_bytes(p):
        return p.filter_height, p.filter_width * p.channels
    return p.taps, p.channels


def _steps(p: Conv2dProblem) -> int:
    """Return the MMA steps per segment."""
    return ceil_div(_segments(p)[1] * p.element_bytes, STEP_BYTES)


@lru_cache(1024)
def _conflicts(p: Conv2dProblem) -> float:
    """Return the passes of a read of one unit by all lanes: 8 pixels, and 4 lanes along each."""
    pixel = p.stride[1] * (p.channels * p.element_bytes + _gap_bytes(p))
    starts = [row * pixel + lane * LANE_BYTES for row in range(8) for lane in range(4)]
    words = {(start + byte) // 4 for start in starts for byte in range(0, _unit_bytes(p), 2)}
    return float(max(Counter(word % BANKS for word in words).values()))


@lru_cache(1024)
def _flat(p: Conv2dProblem) -> Conv2dProblem:
    """Return a 1x1 problem as a single row of pixels."""
    if p.taps > 1 or p.stride != (1, 1) or p.padding != (0, 0):
        return p
    return replace(p, batch=1, height=1, width=p.output_pixels)


def _parts(width: int, fewest: int, most: int) -> Iterator[int]:
    """Yield the distinct sizes of `width` in `fewest` to `most` equal parts, rounded up."""
    count = fewest
    while count <= most:
        part = ceil_div(width, count)
        yield part
        if part == 1:
            return
        count = ceil_div(width, part - 1)  # the smallest count with a smaller part


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[RaggedConfig, ...]:
    sums = SUMS if _products(p) == 1 else SUMS // 2
    blocks_n = ceil_div(p.filters, BLOCK_N)
    tiles_n = ceil_div(blocks_n, ceil_div(blocks_n, min(MOST_BLOCKS_N, sums // 4)))
    found = {}
    for tiles_m in (4, 2, 1):
        if tiles_m > 1 and 4 * tiles_m * tiles_n > sums:
            continue
        pixels = WARPS * 16 * tiles_m
        fewest = ceil_div(p.output_width, pixels)
        for columns in set(_parts(p.output_width, fewest, min(p.output_width, 32 * fewest))):
            rows = min(p.output_height, pixels // columns)
            config = RaggedConfig(
                ceil_div(p.output_height, ceil_div(p.output_height, rows)), columns, tiles_m, tiles_n
            )
            tiling = _Tiling(p, config)
            if tiling.shared_bytes <= card.shared_bytes:
                config = replace(config, blocks_per_sm=tiling.fitting_blocks(card))
                found[config] = _Tiling(p, config).clocks(card)
    ordered = sorted(found, key=lambda config: found[config])
    return portable_first(ordered, lambda config: _Tiling(p, config).shared_bytes, MOST_CONFIGS)


@dataclass(frozen=True)
class Ragged(Conv2dRung[RaggedConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = 2.0**-21  # split operands have 22 bits each
    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.channels * p.element_bytes % VECTOR_BYTES == 0 and p.filters > FEW_FILTERS:
            return (
                f"{name} takes channels that are no multiple of {VECTOR_BYTES} bytes, or up to {FEW_FILTERS} filters, "
                f"not {p.channels} and {p.filters}; fused_epilogue takes them"
            )
        if p.batch < 1:
            return f"{name} needs a batch of at least 1"
        if _steps(p) > MOST_STEPS or not _best_first(_flat(p).dense, self.card):
            return (
                f"{name} keeps windows in shared memory; those of {p.filter_height}x{p.filter_width} filters over "
                f"{p.channels} channels do not fit into {self.card.shared_bytes} bytes. fused_epilogue takes any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[RaggedConfig, ...]:
        """Return the configs; the first fits every card, if one does."""
        return _best_first(_flat(problem).dense, self.card)

    def clocks(self, problem: Conv2dProblem, config: RaggedConfig) -> float:
        return _Tiling(_flat(problem), config).clocks(self.card)

    def recipe(self, problem: Conv2dProblem, config: RaggedConfig) -> Recipe:
        p = _flat(problem)
        tiling = _Tiling(p, config)
        blocks_n = tiling.filter_blocks * config.tiles_n
        packed = _segments(p)[0] * _steps(p) * blocks_n * 32 * LANE_BYTES
        packing = KernelCall(
            Program.of("conv2d/ragged_weights.cu", problem=p, gap=_gap_bytes(p) // p.element_bytes),
            (ceil_div(packed // p.element_bytes, 256), 1, 1),
            (256, 1, 1),
            (Buffer("weight"), Buffer("packed_weight"), p.filters, blocks_n),
            weights_only=True,
            overlap=True,
        )
        product = KernelCall(
            Program.of(
                "conv2d/ragged.cu",
                constants=activation.constants_of(p),
                problem=p,
                gap=_gap_bytes(p) // p.element_bytes,
                unit=_unit_bytes(p) // p.element_bytes,
                warps=WARPS,
                config=config,
                products=_products(p),
                filters_aligned=p.filters % (BLOCK_N * config.tiles_n) == 0,
            ),
            (tiling.tiles * tiling.filter_blocks, 1, 1),
            (WARPS * 32, 1, 1),
            (
                Buffer("x"),
                Buffer("packed_weight"),
                Buffer("bias", optional=True),
                Buffer("residual", optional=True),
                Buffer("y"),
                arguments.shape(p),
            ),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return Recipe((packing, product), (Workspace("packed_weight", packed),))


# Prediction for 50to75_56_k1s1 at batch 32 in fp16, 0.75 GFLOP and 25 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Ragged(
        "ragged",
        "channels that are no multiple of a copy need no padding: windows are stored in shared memory as in x, lanes "
        "read their operands from there, and weights are packed in the order of lanes",
        below="fused_epilogue",
        # 6 us of traffic and 4 us of single-element stores, against 22 us with a launch that pads x.
        predicted_gain=2.0,
    ),
)
