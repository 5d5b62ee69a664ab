"""Static memory planning: one arena for all values of a plan, with offsets assigned from lifetimes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes that every offset is a multiple of, for vector loads and TMA."""


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are live from step `first` through step `last`."""

    name: str
    bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Offsets by name, the total size in bytes, and the lifetimes they were assigned from."""

    offsets: Mapping[str, int]
    bytes: int
    lifetimes: tuple[Lifetime, ...]


def assign_offsets(lifetimes: Iterable[Lifetime]) -> Arena:
    """Place the largest first, each at the lowest offset that is free for its whole lifetime."""
    placed: list[tuple[int, int, Lifetime]] = []
    total = 0
    for value in sorted(lifetimes, key=lambda value: (-value.bytes, value.first, value.name)):
        size = -(-max(value.bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for low, high, other in sorted(placed, key=lambda entry: entry[0]):
            if not value.overlaps(other):
                continue
            if start + size <= low:
                break
            start = max(start, high)
        placed.append((start, start + size, value))
        total = max(total, start + size)
    offsets = {value.name: start for start, _, value in placed}
    return Arena(offsets, total, tuple(value for *_, value in placed))


def peak_bytes(lifetimes: Sequence[Lifetime], first: int, last: int) -> int:
    """Return the most bytes that are live at any one step from `first` through `last`."""
    return max(
        (
            sum(value.bytes for value in lifetimes if value.first <= step <= value.last)
            for step in range(first, last + 1)
        ),
        default=0,
    )
