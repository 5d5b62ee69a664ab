"""Strided rows that are adjacent in memory (softmax over channels in NCHW): how the warps of a CTA share them."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config

MOST_VALUES = 32
"""Most values per thread, held in registers."""
MOST_PARTS, BEST_PARTS = 32, 8
"""Most warps per CTA, and the most that leave room for a second CTA on the SM."""
MOST_LENGTH = MOST_PARTS * MOST_VALUES
"""Longest row that fits into the registers of a CTA."""
_PACKS = 32


@dataclass(frozen=True)
class ColumnsConfig(Config):
    vector: int
    """Adjacent rows per lane."""
    parts: int
    """Warps that share the elements of a row."""

    def grid(self, rows: int) -> int:
        return ceil_div(rows // self.vector, _PACKS)


def configs(rows: int, length: int, inner: int, dtype: str, card: Card) -> tuple[ColumnsConfig, ...]:
    """Return each width with the fewest warps that hold the rows; the widest that keeps all SMs busy comes first."""
    offered = []
    vector = widest_vector(dtype, inner)
    while vector:
        for parts in (1, 2, 4, 8, 16, 32):
            if ceil_div(length, parts) * vector <= MOST_VALUES:
                offered.append(ColumnsConfig(vector, parts))
                break
        vector //= 2

    def rank(one: ColumnsConfig) -> tuple[bool, int, int]:
        return one.parts > BEST_PARTS, card.multiprocessors // max(1, one.grid(rows)), -one.vector

    return tuple(sorted(offered, key=rank))


def refusal(name: str, rows: int, length: int, inner: int) -> str | None:
    """Return why such a rung does not support these rows; None if it does."""
    if inner == 1:
        return f"{name} is for strided rows; these are contiguous"
    if rows >= 2**31:
        return f"{name} counts rows in 32 bits; there are {rows}"
    if length > MOST_LENGTH:
        return f"{name} holds rows of up to {MOST_LENGTH} elements in registers, not of {length}"
    return None


def refusal_of_dense(name: str, inner: int) -> str | None:
    """Return why a rung for contiguous rows does not support these; None if it does."""
    return f"{name} needs contiguous rows; here elements are {inner} apart" if inner > 1 else None
