"""Rows whose elements lie apart, side by side with their neighbours: how a block's warps share them."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config

MOST_VALUES = 32
"""Values of a thread at most, in registers."""
MOST_PARTS, BEST_PARTS = 32, 8
"""Warps of a block, and how many leave it room beside another."""
MOST_LENGTH = MOST_PARTS * MOST_VALUES
"""Elements of a row that fit into the registers of a block."""
_PACKS = 32


@dataclass(frozen=True)
class ColumnsConfig(Config):
    vector: int
    """Neighbouring rows that a lane takes."""
    parts: int
    """Warps that share the elements of a row."""

    def grid(self, rows: int) -> int:
        return ceil_div(rows // self.vector, _PACKS)

    def constants(self, length: int) -> dict[str, Constant]:
        return {"VECTOR": self.vector, "PARTS": self.parts, "STEPS": ceil_div(length, self.parts)}


def configs(rows: int, length: int, inner: int, dtype: str, card: Card) -> tuple[ColumnsConfig, ...]:
    """Each width with the fewest warps that hold the rows: the widest first that leaves no multiprocessor idle."""
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
    """Why such a rung does not take rows of that length, in a sentence; None if it does."""
    if inner == 1:
        return f"{name} takes rows whose elements lie apart"
    if rows >= 2**31:
        return f"{name} counts rows in 32 bits; there are {rows}"
    if length > MOST_LENGTH:
        return f"{name} holds rows of up to {MOST_LENGTH} elements in registers, not of {length}"
    return None


def refusal_of_dense(name: str, inner: int) -> str | None:
    """Why a rung for rows that lie in one piece does not take others, in a sentence."""
    return f"{name} takes rows whose elements lie one behind the other" if inner > 1 else None
