"""Tiles of an image by some of its channels, which blocks that stay take one after another."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem


class TileSizes(Protocol):
    """What a config says of its tiles."""

    @property
    def channels(self) -> int: ...
    @property
    def images(self) -> int: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def tile_columns(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...


class Tiles:
    """How many tiles a problem has, and who takes them; the same sums as in the kernels."""

    problem: Conv2dProblem
    config: TileSizes
    card: Card

    @cached_property
    def channel_blocks(self) -> int:
        return ceil_div(self.problem.channels, self.config.channels)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across an image."""
        p, c = self.problem, self.config
        return ceil_div(p.output_height, c.tile_rows), ceil_div(p.output_width, c.tile_columns)

    @cached_property
    def tiles(self) -> int:
        return ceil_div(self.problem.batch, self.config.images) * self.grid[0] * self.grid[1]

    @cached_property
    def rounds(self) -> int:
        """Tiles of a block."""
        at_once = self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks
        return ceil_div(self.tiles, max(1, at_once))

    @cached_property
    def workers(self) -> int:
        """Blocks that share the tiles of the same channels."""
        return ceil_div(self.tiles, self.rounds)
