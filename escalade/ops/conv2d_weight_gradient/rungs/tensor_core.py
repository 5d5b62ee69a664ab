"""Weight gradients for any filter by cp.async and mma.sync, on every architecture, with split-K over pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.arguments import SPLIT_PRODUCTS
from escalade.ops.conv2d.rungs.rung import fitting_blocks
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import WeightGradientRung

SIDES = (32, 64, 128)
"""Filters and columns per tile."""
PIXELS = (32, 64)
"""Pixels per k-tile."""
STAGES = (3, 4)
GAP = 8
"""Elements between rows in shared memory."""
WARP = 32
WORD_BYTES = 4
"""Least bytes of a cp.async."""
WINDOW_BYTES = 16
MOST_BLOCKS = 8
MOST_CONFIGS = 8
BESIDES = 56
"""Registers besides accumulators and operands."""
LINE_BYTES = 128
"""Bytes that shared memory reads per clock."""
COPY, WINDOW_COPY = 12.0, 20.0
"""Instructions per copy: address, bounds, and the copy; of an input behind a window that is looked up."""
THROUGH_REGISTERS = 8.0
"""Additional instructions of a copy too narrow for cp.async (a guess)."""
ISSUE_RATE = 2.5
"""Instructions that an SM issues per clock in loops with dependences."""
MEASURED = {2: 1.5, 4: 2.2}
"""Measured / modeled cycles by bytes per element, fitted on 3072to768_1_k1s1_b6304 and 64to64_56_k3s1_b64 (H200).
32-bit operands are read and rounded one by one."""
TURN, LOADED_TURN = 250.0, 900.0
"""Clocks per k-tile of a CTA alone: its wait, barrier and first operands, which other CTAs hide; with copies through
registers also the latency of a load, as only one k-tile is in flight (a guess)."""


@dataclass(frozen=True)
class TensorCoreConfig(Config):
    filters: int
    """Filters per tile."""
    columns: int
    """Columns per tile: the channels of one tap after another."""
    pixels: int
    """Pixels per k-tile."""
    stages: int
    blocks_per_sm: int = 1
    part_tiles: int = 1
    """k-tiles per CTA."""

    @property
    def threads(self) -> int:
        return 2 * self.columns


@dataclass(frozen=True)
class _Tiling:
    problem: Conv2dWeightGradientProblem
    config: TensorCoreConfig
    card: Card

    @property
    def tiles(self) -> int:
        f, c = self.problem.forward, self.config
        return (
            f.groups * ceil_div(f.group_filters, c.filters) * ceil_div(f.taps * f.group_channels, c.columns)
        )

    @property
    def k_tiles(self) -> int:
        return ceil_div(self.problem.forward.output_pixels, self.config.pixels)

    @property
    def stage_bytes(self) -> int:
        c = self.config
        return (c.filters + c.columns + 2 * GAP) * c.pixels * self.problem.forward.element_bytes

    @property
    def shared_bytes(self) -> int:
        return self.config.stages * self.stage_bytes + 2 * self.config.pixels * WINDOW_BYTES

    @property
    def registers(self) -> int:
        accumulators = 16 * self.config.filters // 32
        return (accumulators + 16) * (2 if self.problem.dtype == "fp32" else 1) + BESIDES

    @property
    def fitting_blocks(self) -> int:
        blocks = fitting_blocks(self.card, self.config.threads, self.registers, self.shared_bytes)
        return min(blocks, MOST_BLOCKS)

    @property
    def work(self) -> parts.SplitWork:
        f, c = self.problem.forward, self.config
        products = c.filters * c.columns * c.pixels * (SPLIT_PRODUCTS if f.dtype == "fp32" else 1)
        multiplied = products * f.element_bytes / (2 * self.card.rates.mma_products)
        read_by_warp = (c.filters // 2 + 32) * c.pixels * f.element_bytes
        read = c.threads / WARP * read_by_warp / LINE_BYTES
        is_pointwise = f.taps == 1 and f.stride == (1, 1) and f.padding == (0, 0)
        issued, turn = 0.0, TURN
        for tile, elements, each in (
            (c.filters, f.group_filters, COPY),
            (c.columns, f.group_channels, COPY if is_pointwise else WINDOW_COPY),
        ):
            unit = copied_at_once(elements, f.element_bytes)
            if unit * f.element_bytes < WORD_BYTES:
                each, turn = each + THROUGH_REGISTERS, LOADED_TURN
            issued += c.pixels * tile / unit * each / WARP / ISSUE_RATE
        copied = self.stage_bytes / self.card.rates.copies.mma_ring.alone
        busy = sorted((multiplied, read, issued, copied))
        taken = MEASURED[f.element_bytes] * (busy[3] + 0.3 * busy[2])
        cycles = max(taken * c.blocks_per_sm, turn)
        slots = self.card.multiprocessors * c.blocks_per_sm
        elements = self.problem.part_elements
        return parts.SplitWork(self.tiles, self.k_tiles, cycles, slots, elements, self.card, direct=True)


def copied_at_once(elements: int, element_bytes: int) -> int:
    """Return the elements per copy for rows of `elements`: 16, 8, 4 or 2 bytes."""
    return next(size for size in (16, 8, 4, 2) if elements * element_bytes % size == 0) // element_bytes


def _candidates(problem: Conv2dWeightGradientProblem, card: Card) -> Iterator[_Tiling]:
    f = problem.forward
    for filters, columns, pixels, stages in product(SIDES, SIDES, PIXELS, STAGES):
        if filters > max(32, 2 * f.group_filters) or columns > max(32, 2 * f.taps * f.group_channels):
            continue
        units = (
            filters // copied_at_once(f.group_filters, f.element_bytes),
            columns // copied_at_once(f.group_channels, f.element_bytes),
        )
        config = TensorCoreConfig(filters, columns, pixels, stages)
        tiling = _Tiling(problem, config, card)
        fits = tiling.shared_bytes <= card.shared_bytes and tiling.fitting_blocks
        if max(*units, pixels) > config.threads or not fits:
            continue
        if problem.dtype == "fp32" and filters > 64:
            continue  # the second accumulators would spill
        resident = replace(config, blocks_per_sm=tiling.fitting_blocks)
        best = _Tiling(problem, resident, card).work.best()
        yield _Tiling(problem, replace(resident, part_tiles=best), card)


@lru_cache(4096)
def _best_first(problem: Conv2dWeightGradientProblem, card: Card) -> tuple[TensorCoreConfig, ...]:
    tilings = sorted(_candidates(problem, card), key=lambda t: t.work.cost(t.config.part_tiles))
    return tuple(tiling.config for tiling in tilings[:MOST_CONFIGS])


@dataclass(frozen=True)
class TensorCore(WeightGradientRung[TensorCoreConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True
    split_rounding = SPLIT_ROUNDING

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if f.groups > 1 and f.group_channels == 1:
            return f"{self.name} would compute 32 products for each of {f.name}; depthwise takes it"
        if f.output_pixels >= 2**31:
            return f"{self.name} counts up to 2^31 output pixels, not {f.output_pixels}; direct takes any"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[TensorCoreConfig, ...]:
        return _best_first(problem, self.card)

    def estimate(self, problem: Conv2dWeightGradientProblem, config: TensorCoreConfig) -> float:
        return _Tiling(problem, config, self.card).work.microseconds(problem, config.part_tiles)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: TensorCoreConfig) -> Recipe:
        f, tiling = problem.forward, _Tiling(problem, config, self.card)
        count = ceil_div(tiling.k_tiles, config.part_tiles)
        launch = KernelCall(
            Program.of(
                "conv2d_weight_gradient/tensor_core.cu",
                problem=problem,
                products=SPLIT_PRODUCTS if f.dtype == "fp32" else 1,
                forward=f,
                config=config,
                direct=count == 1,
            ),
            (tiling.tiles, count, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"),
                Buffer("gradient"),
                *parts.targets(count == 1),
                arguments.shape(f),
                config.part_tiles,
            ),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return parts.recipe(problem, launch, count, direct=count == 1)


# Prediction for 58to58_28_k1s1 at batch 64 in fp16, 0.34 GFLOP and 12 MB.
TENSOR_CORE = TensorCore(
    "tensor_core",
    "cp.async copies windows and gradients into a ring of stages, from 16 bytes to one word at once, and mma.sync sums "
    "over pixels; fp32 as two TF32 parts, where an infinity becomes NaN",
    below="direct",
    # direct: 0.17 G products of 88 instructions, 4 warps per cycle and SM: 0.5 ms. Here 2.9 million copies of a word
    # take 12 instructions each, 3.3 us, which hide behind 12 MB of L2; two launches, and the start of 8 us.
    predicted_gain=60.0,
    dtypes=MULTIPLIED,
)
