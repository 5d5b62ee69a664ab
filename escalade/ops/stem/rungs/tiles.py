"""Tiles of the stem's tensor-core rungs, and their cost."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.ops.base.card import Card
from escalade.ops.base.grid import blocks
from escalade.ops.stem.problem import Pool, StemProblem

POOLS: dict[Pool | None, int] = {None: 0, (2, 2, 0): 2, (3, 2, 1): 3}
"""Pools supported in registers, and their number in kernels/stem/tile.cuh."""
PIXEL_BYTES = 8
MOST_WIDTH = 8
"""A filter row is one or two steps of 4 taps."""
STAGING_CLOCKS = 3000
"""Clocks for a CTA to load, convert and store its first pixels, and to start (estimate)."""


def filter_steps(problem: StemProblem) -> int:
    """Return the MMA steps of 16 values of k: 4 taps of a filter row by 4 channels."""
    return problem.filter_height * blocks(problem.filter_width, 4)


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` rows of y by `columns` columns of the convolution."""

    problem: StemProblem
    rows: int
    columns: int

    @property
    def pool(self) -> int:
        return POOLS[self.problem.pool]

    @property
    def halo(self) -> int:
        """Column that both tiles of a row compute, because pooling windows overlap."""
        needed = min(self.problem.conv_width, 2 * self.problem.output_width)
        return int(self.pool == 3 and self.columns < needed)

    @property
    def row_tiles(self) -> int:
        return blocks(self.problem.output_height, self.rows)

    @property
    def column_tiles(self) -> int:
        return blocks(self.problem.output_width, self.columns // (2 if self.pool else 1) - self.halo)

    @property
    def tiles(self) -> int:
        return max(1, self.problem.batch) * self.row_tiles * self.column_tiles

    def conv_rows(self, rows: int) -> int:
        return rows * (2 if self.pool else 1) + int(self.pool == 3)

    @property
    def staged_pixels(self) -> int:
        p = self.problem
        rows = (self.conv_rows(self.rows) - 1) * p.stride[0] + p.filter_height
        columns = (self.columns - 1) * p.stride[1] + 4 * blocks(p.filter_width, 4)
        return rows * 2 * blocks(columns, 2)

    @property
    def masks_columns(self) -> bool:
        """True if the last column of a pooling window may be outside of the convolution."""
        return self.pool == 3 and (bool(self.halo) or self.problem.conv_width % 2 == 1)

    def clocks(self, busy: float, alone: float, sharing: int, card: Card) -> float:
        """Estimate the clocks of the busiest SM. A tile keeps its tensor cores `busy`, takes `alone` clocks by itself,
        and `sharing` tiles fit on an SM."""
        each = blocks(self.tiles, card.multiprocessors)
        return max(each * busy, blocks(each, min(each, sharing)) * alone)
