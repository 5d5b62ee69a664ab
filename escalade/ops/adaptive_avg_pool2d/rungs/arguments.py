"""What the rungs of adaptive_avg_pool2d share."""

from __future__ import annotations

BUSY_THREADS = 1024
"""Threads a multiprocessor that fill it by half."""
