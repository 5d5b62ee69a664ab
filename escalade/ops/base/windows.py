"""Pixels of an image that the windows of a convolution or a pool read."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def touched(size: int, outputs: int, taps: int, stride: int, padding: int = 0, dilation: int = 1) -> int:
    """Return the number of pixels along one axis that some window covers; the other taps fall into padding."""
    if stride <= taps and dilation == 1:  # windows are adjacent or overlap: one contiguous range
        end = (outputs - 1) * stride - padding + taps
        return max(0, min(size, end) - max(0, -padding)) if outputs else 0
    pixels = {
        start + tap * dilation
        for start in range(-padding, outputs * stride - padding, stride)
        for tap in range(taps)
    }
    return sum(0 <= pixel < size for pixel in pixels)
