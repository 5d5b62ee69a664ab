"""One block of memory for all values of a plan: where each lies, given when it is alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""The alignment of every value, as PyTorch's allocator has it."""


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are needed from one step to another, both included."""

    name: str
    bytes: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Offsets by name, the size of the whole, and what was placed."""

    offsets: Mapping[str, int]
    bytes: int
    lifetimes: tuple[Lifetime, ...]


def assign(lifetimes: Iterable[Lifetime]) -> Arena:
    """The largest first, each at the lowest offset where nothing that is alive at the same time lies."""
    placed: list[tuple[int, int, Lifetime]] = []
    total = 0
    for value in sorted(lifetimes, key=lambda value: (-value.bytes, value.first, value.name)):
        size = -(-max(value.bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for low, high, other in sorted(placed, key=lambda entry: entry[0]):
            if not value.meets(other):
                continue
            if start + size <= low:
                break
            start = max(start, high)
        placed.append((start, start + size, value))
        total = max(total, start + size)
    offsets = {value.name: start for start, _, value in placed}
    return Arena(offsets, total, tuple(value for *_, value in placed))


def most_alive(lifetimes: Sequence[Lifetime], first: int, last: int) -> int:
    """The most bytes that are needed at once, at any step from one to another, both included."""
    return max(
        (
            sum(value.bytes for value in lifetimes if value.first <= step <= value.last)
            for step in range(first, last + 1)
        ),
        default=0,
    )
