"""What an H200 does in a microsecond: the rates that estimates are made from. Other cards have the tuner.

An estimate only has to put candidates in order. The figures are set by hand, from records: `escalade tune --judge`
shows for every rung how its measured times compare with its estimates.
"""

from __future__ import annotations

from collections.abc import Mapping

SMS = 132
"""The defaults are chosen for an H200; other cards have the tuner."""
CLUSTERS = {1: SMS, 2: 66, 3: 40, 4: 28, 5: 22, 6: 16, 7: 14, 8: 14}
"""Clusters of so many blocks that an H200 runs at once, one block a multiprocessor: their blocks are neighbours."""
FILLED = 4 * SMS
"""Blocks that keep a large card busy: four on each multiprocessor."""
SHARED_BYTES: Mapping[str, int] = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""The shared memory of a block, by architecture."""
MOST_SHARED = max(SHARED_BYTES.values())
"""Of a block on Hopper and on data-centre Blackwell. A multiprocessor has 1 KiB more for all its blocks together, each
of which takes 1 KiB besides what it asks for."""
LEAST_SHARED = min(SHARED_BYTES.values())
"""Of a block on every card since Ampere."""

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
