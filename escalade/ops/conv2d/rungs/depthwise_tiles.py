"""Tiles of an image and a range of channels, processed by persistent CTAs."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem


class TileSizes(Protocol):
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
    """Tile counts; the kernels compute the same."""

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
        """Tiles per CTA."""
        at_once = self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks
        return ceil_div(self.tiles, max(1, at_once))

    @cached_property
    def workers(self) -> int:
        """CTAs per range of channels."""
        return ceil_div(self.tiles, self.rounds)
