"""Strided rows that are adjacent in memory (softmax over channels in NCHW): how the warps of a CTA share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Argument, Recipe
from escalade.ops.base.card import RESERVED_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, full_vector, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config

FP32_BYTES = 4

MOST_VALUES = 32
"""Most values per thread, held in registers."""
MOST_PARTS, BEST_PARTS = 32, 8
"""Most warps per CTA: in all, and if a second CTA is to fit on the SM."""
_PARTS = (1, 2, 4, 8, 16, 32)
MOST_LENGTH = MOST_PARTS * MOST_VALUES
"""Longest row that fits into the registers of a CTA."""
_SEGMENT_BYTES = 128
"""Contiguous bytes per element of a tile below which DRAM is slower: a cache line."""
_THREADS = 128
"""Threads per CTA if rows are short: an SM runs at most 32 CTAs."""
_OTHER_REGISTERS = 32
"""Registers per thread besides its values."""
_FUNCTION_REGISTERS = 16
"""More of them for an activation, or for logarithms."""
_MOST_BLOCKS = 32  # CTAs per SM
_LEAST_COPY_BYTES = 4  # of cp.async
_CTAS_PER_SM = 4
"""CTAs per SM that hide each other's latency: 64 rows of 65,536 columns take 5.4 us with 1,024 CTAs, 5.8 with 512."""


@dataclass(frozen=True)
class ColumnsConfig(Config):
    vector: int
    """Adjacent rows per thread."""
    parts: int
    """Groups of warps that share the elements of a row."""
    across: int
    """Packs of rows per tile."""

    @property
    def threads(self) -> int:
        return self.across * self.parts

    def tiles(self, rows: int) -> int:
        return ceil_div(rows // self.vector, self.across)

    def steps(self, length: int) -> int:
        """Return the elements of a row per thread."""
        return ceil_div(length, self.parts)

    def tile_bytes(self, length: int, dtype: str) -> int:
        return self.threads * self.steps(length) * self.vector * ELEMENT_BYTES[dtype]

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory for reductions over parts."""
        return FP32_BYTES * self.vector * self.threads if self.parts > 1 else 0


def configs(
    rows: int, length: int, inner: int, dtype: str, card: Card, tensors: int = 1
) -> tuple[ColumnsConfig, ...]:
    """Return each width with the fewest warps that hold the rows, and with twice as many, side by side or as parts.

    The widest that gives every SM several CTAs comes first. A thread holds the rows of `tensors` tensors.
    """
    offered, most = [], MOST_VALUES // tensors
    vector = widest_vector(dtype, inner)
    while vector:
        parts = next((some for some in _PARTS if ceil_div(length, some) * vector <= most), 0)
        if parts:
            across = max(32, _THREADS // parts)
            more = ((0, parts, across), (1, parts, 2 * across), (2, 2 * parts, across))
            offered += [
                (turn, ColumnsConfig(vector, *sizes)) for turn, *sizes in more if sizes[0] * sizes[1] <= 1024
            ]
        vector //= 2

    def rank(turn: int, one: ColumnsConfig) -> tuple[int, bool, int, int, int]:
        is_narrow = (
            one.vector < full_vector(dtype) and 32 * one.vector * ELEMENT_BYTES[dtype] < _SEGMENT_BYTES
        )
        idle = _CTAS_PER_SM * card.multiprocessors // max(1, one.tiles(rows))
        return turn, is_narrow, max(one.parts, BEST_PARTS), idle, -one.vector

    return tuple(config for _, config in sorted(offered, key=lambda pair: rank(*pair)))


def column_launch(
    config: ColumnsConfig, rows: int, length: int, dtype: str, card: Card, program: Callable[..., Program],
    *arguments: Argument, more_bytes: int = 0, functions: bool = False,
) -> Recipe:  # fmt: skip
    """Return the launch of one wave of persistent CTAs.

    `program` makes the kernel from the scope of its parameters. It has `more_bytes` of shared memory after the tile,
    and more registers if it ends in functions.
    """
    used = more_bytes + config.exchange_bytes
    tile_bytes = config.tile_bytes(length, dtype)
    staged = (
        config.vector * ELEMENT_BYTES[dtype] >= _LEAST_COPY_BYTES
        and tile_bytes + used <= card.shared_bytes - RESERVED_SHARED
    )
    dynamic_bytes = (tile_bytes if staged else 0) + more_bytes
    values = config.steps(length) * config.vector
    registers = _OTHER_REGISTERS + _FUNCTION_REGISTERS * functions + 2 * max(0, config.vector - 4) + values
    by_registers = card.registers // (config.threads * registers)
    by_shared = card.multiprocessor_shared_bytes // (dynamic_bytes + config.exchange_bytes + RESERVED_SHARED)
    blocks_per_sm = max(1, min(by_registers, by_shared, _MOST_BLOCKS))
    return launch(
        program(config=config, steps=config.steps(length), staged=staged, blocks_per_sm=blocks_per_sm),
        min(config.tiles(rows), blocks_per_sm * card.multiprocessors),
        config.threads,
        *arguments,
        shared_bytes=dynamic_bytes,
    )


def refusal(name: str, rows: int, length: int, inner: int, tensors: int = 1) -> str | None:
    """Return why such a rung does not support these rows; None if it does."""
    if inner == 1:
        return f"{name} is for strided rows; these are contiguous"
    if rows >= 2**31:
        return f"{name} counts rows in 32 bits; there are {rows}"
    if length > MOST_LENGTH // tensors:
        return f"{name} holds rows of up to {MOST_LENGTH // tensors} elements in registers, not of {length}"
    return None


def refusal_of_dense(name: str, inner: int) -> str | None:
    """Return why a rung for contiguous rows does not support these; None if it does."""
    return f"{name} needs contiguous rows; here elements are {inner} apart" if inner > 1 else None
