"""Grid sizes."""

from __future__ import annotations


def ceil_div(work: int, each: int) -> int:
    return -(-work // each)


def blocks(work: int, each: int) -> int:
    """Return the CTAs that cover `work` items, at least one."""
    return max(1, ceil_div(work, each))
