"""Which pixels of an image the windows of a convolution or a pool touch: the others need not be read."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def touched(size: int, outputs: int, taps: int, stride: int, padding: int = 0, dilation: int = 1) -> int:
    """How many of the pixels along one axis are in some window; a window's other taps are in the padding."""
    if stride <= taps and dilation == 1:  # windows meet, so they touch all from the first to the last
        end = (outputs - 1) * stride - padding + taps
        return max(0, min(size, end) - max(0, -padding)) if outputs else 0
    places = {
        start + tap * dilation
        for start in range(-padding, outputs * stride - padding, stride)
        for tap in range(taps)
    }
    return sum(0 <= place < size for place in places)
