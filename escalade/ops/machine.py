"""What an H200 does in a microsecond: the rates that estimates are made from. Other cards have the tuner.

An estimate only has to put candidates in order. The figures are set by hand, from records: `escalade tune --judge`
shows for every rung how its measured times compare with its estimates.
"""

from __future__ import annotations

CLOCK = 1750.0
"""Clocks of a multiprocessor in a microsecond, under load."""
LAUNCH_US = 1.5
"""From the end of one launch to the first results of the next: measured steps of a network take that much more than
their clocks."""
L2_BYTES = 50e6
DRAM_RATE = 4.2e6
"""Bytes in a microsecond, as a copy moves them."""
L2_RATE = 7.0e6
"""The same of what the L2 cache holds since the launch before."""
FP32_RATE = 60e6
"""Operations in a microsecond on CUDA cores, under load."""


def passing(moved: float) -> float:
    """Microseconds in which so many bytes are moved."""
    return moved / (L2_RATE if moved <= L2_BYTES / 2 else DRAM_RATE)


def microseconds(clocks: float, moved: float, launches: int = 1) -> float:
    """Of launches one after the other: the busiest multiprocessor's clocks, or the bytes if they take longer."""
    return launches * LAUNCH_US + max(clocks / CLOCK, passing(moved))
