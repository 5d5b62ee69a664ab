"""How many pieces work is cut into."""

from __future__ import annotations


def ceil_div(work: int, each: int) -> int:
    """How many pieces of `each` it takes."""
    return -(-work // each)


def blocks(work: int, each: int) -> int:
    """How many blocks of `each` a launch takes: at least one."""
    return max(1, ceil_div(work, each))
