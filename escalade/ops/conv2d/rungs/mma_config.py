"""Tile configs of the mma.sync rungs, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from escalade.device.program import Constant, Macro, Type
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.rung import portable_first

MOST_SPLITS = 32
MOST_CONFIGS = 24
LATENCY = 1200
"""Clocks of two L2 round trips (estimate): of the first copies and the last stores, or of a partial sum and its
ticket."""


@dataclass(frozen=True)
class MmaConfig(Config):
    tile_m: int
    """Output pixels per CTA."""
    tile_n: int
    """Filters per CTA."""
    row_bytes: int
    """Bytes of k per row of shared memory: 64 or 128."""
    warps_m: int
    warps_n: int
    stages: int
    """Stages of the copy pipeline."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""
    splits: int = 1
    """CTAs that share one sum (split-K)."""
    through_l1: bool = False
    """Copy through L1, where the next tap could find most of its pixels."""

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.tile_m // self.warps_m, self.tile_n // self.warps_n

    @property
    def shared_bytes(self) -> int:
        staged_rows = self.warps_m * self.warps_n * 16 * (self.warp_tile[1] + 8) * 4
        return max(self.stages * (self.tile_m + self.tile_n) * self.row_bytes, staged_rows)

    def grid(self, problem: Conv2dProblem) -> tuple[int, int, int]:
        tiles_n = problem.groups * ceil_div(problem.group_filters, self.tile_n)
        return ceil_div(problem.output_pixels, self.tile_m) * tiles_n, self.splits, 1

    def valid(self, operands: Operands, card: Card) -> bool:
        """True if every thread copies the same number of chunks, in rows with the same swizzle, and registers
        suffice."""
        rows_at_once = self.threads * operands.copy_bytes // self.row_bytes
        sums = self.tile_m * self.tile_n // self.threads
        # Computing the shortcut's windows while 128 accumulators and their operands are live spills with eight windows
        # at once.
        crowded = operands.problem.shortcut_channels > 0 and sums >= 128 and self.tile_m >= 8 * rows_at_once
        # 8-bit operands are held as loaded and, on Hopper, also widened to 16 bits.
        crowded |= operands.element_bytes == 1 and sums >= 128
        return (
            rows_at_once % 8 == 0
            and self.tile_m % rows_at_once == 0
            and self.tile_n % rows_at_once == 0
            and self.shared_bytes <= card.shared_bytes
            and not crowded
        )

    def depth_tiles(self, operands: Operands) -> int:
        """Return the k-tiles; the shortcut starts a new one."""
        p = operands.problem
        depths = (p.taps * operands.channels, p.shortcut_channels)
        return sum(ceil_div(depth * operands.element_bytes, self.row_bytes) for depth in depths)

    def cost(self, operands: Operands, card: Card, products: int = 1) -> float:
        """Estimate the clocks of the busiest SM, with `products` tensor-core products per product of the problem.

        Larger warp tiles read less shared memory per product; eight warps hide latency, four do not quite; filling the
        pipeline and storing the tile cost as much as 512 bytes of depth, a barrier as 8.
        """
        warp_m, warp_n = self.warp_tile
        efficiency = min(1.0, 0.3 + warp_m * warp_n / (warp_m + warp_n) / 45)
        tiles, splits, _ = self.grid(operands.problem)
        rounds = ceil_div(tiles * splits, card.multiprocessors)
        warps = min(rounds, self.blocks_per_sm) * self.warps_m * self.warps_n
        busy = min(1.0, 0.4 + warps / 13)
        # mma.sync widens 8-bit elements to 16 bits on Hopper, which doubles the work per byte.
        rate = 2 * card.rates.mma_products * min(2, operands.element_bytes) / 2 / products
        product = self.tile_m * self.tile_n / (rate * efficiency * busy)
        l2_rate = card.copy_rate(card.rates.copies.mma_ring, min(card.multiprocessors, tiles * splits))
        delivery = (self.tile_m + self.tile_n) / l2_rate
        depth_bytes = ceil_div(self.depth_tiles(operands), splits) * (self.row_bytes + 8)
        # The next tap misses L1 after all: configs that differ only in this took 1.00 to 1.03 times as long.
        lookup = 1.03 if self.through_l1 else 1.0
        clocks = max(product * lookup, delivery)
        return rounds * (depth_bytes * clocks + max(512 * clocks, LATENCY)) + self._meeting

    @property
    def _meeting(self) -> float:
        """Clocks to sum the splits: write one part, read all of them on one SM, and the round trips."""
        if self.splits == 1:
            return 0.0
        return LATENCY + (1 + self.splits) * self.tile_m * self.tile_n * 4 / 64


@dataclass(frozen=True)
class Operands:
    """x and weights as the product reads them: element type, and channels padded to the copy size."""

    problem: Conv2dProblem
    element: Type
    element_bytes: int

    @staticmethod
    def stored(problem: Conv2dProblem) -> Operands:
        return Operands(problem, element(problem.dtype), problem.element_bytes)

    @staticmethod
    def halves(problem: Conv2dProblem) -> Operands:
        return Operands(problem, Type("__half"), 2)

    @property
    def channels(self) -> int:
        """Channels per group, padded if no 8-byte copy divides them: to 4, or to a multiple of 16 bytes."""
        quads = 4 * ceil_div(self.problem.group_channels, 4)
        if quads == self.problem.group_channels or quads == 4:
            return quads
        return ceil_div(quads * self.element_bytes, 16) * 16 // self.element_bytes

    @property
    def padded(self) -> bool:
        return self.channels != self.problem.group_channels

    @property
    def copy_bytes(self) -> int:
        return 16 if self.channels * self.element_bytes % 16 == 0 else 8

    def tile_k(self, config: MmaConfig) -> int:
        """Return the elements of k per tile."""
        return config.row_bytes // self.element_bytes

    def partial_channels(self, config: MmaConfig) -> int:
        """Return the channels if the last k-tile of a tap is not full, else 0."""
        return self.channels if self.channels % self.tile_k(config) else 0

    def partial_shortcut(self, config: MmaConfig) -> bool:
        """Return True if the last k-tile of the shortcut is not full."""
        return self.problem.shortcut_channels % self.tile_k(config) != 0

    def switches(self, config: MmaConfig) -> dict[str, Constant]:
        """Return the preprocessor switches of the tensor-core kernels."""
        switches: dict[str, Constant] = {"COPY_THROUGH_L1": Macro("")} if config.through_l1 else {}
        if self.problem.groups > 1:
            switches["GROUPED"] = Macro("")
        return switches


@lru_cache(1024)
def best_first(
    candidates: tuple[MmaConfig, ...], operands: Operands, card: Card, may_split: bool
) -> tuple[MmaConfig, ...]:
    """Return the valid candidates, cheapest first; with `may_split` also split-K where SMs would be idle."""
    whole = [config for config in candidates if config.valid(operands, card)]
    valid = whole + [split for config in whole if may_split for split in _splits(config, operands, card)]
    costs = {config: config.cost(operands, card) for config in valid}
    ordered = sorted(valid, key=lambda config: costs[config])
    return portable_first(ordered, lambda config: config.shared_bytes, MOST_CONFIGS)


def _splits(config: MmaConfig, operands: Operands, card: Card) -> list[MmaConfig]:
    """Return the two best splits that leave no CTA without work and no SM with more than two CTAs."""
    tiles, depth = config.grid(operands.problem)[0], config.depth_tiles(operands)
    most = min(2 * card.multiprocessors // tiles, depth // 2, MOST_SPLITS)
    counts = (count for count in range(2, most + 1) if ceil_div(depth, ceil_div(depth, count)) == count)
    return sorted(
        (config.changed(splits=count) for count in counts), key=lambda split: split.cost(operands, card)
    )[:2]
