"""The GPU architectures that kernels are compiled for, and the features that rungs and cards query.

A new architecture is one more object here, and the kernels that only it can run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """One compilation target of NVRTC."""

    name: str
    """Hopper's own instructions (wgmma, setmaxnreg) need the `a` in sm_90a."""
    capability: tuple[int, int]
    shared_bytes: int
    """Largest dynamic shared memory of a CTA."""
    fp32_lanes: int = 128
    """fp32 lanes per SM."""
    mma_products: float | None = None
    """16-bit multiply-adds of mma.sync per SM and clock, by datasheet; None where Hopper's measured rate is used."""
    has_fp8: bool = True
    has_clusters: bool = False
    """Thread-block clusters with at least 200 KiB of shared memory per CTA."""
    has_wgmma: bool = False


AMPERE = Architecture("sm_80", (8, 0), 163 * _KIB, fp32_lanes=64, mma_products=1024.0, has_fp8=False)
AMPERE_CONSUMER = Architecture("sm_86", (8, 6), 99 * _KIB, mma_products=512.0, has_fp8=False)
ADA = Architecture("sm_89", (8, 9), 99 * _KIB, mma_products=512.0)
HOPPER = Architecture("sm_90a", (9, 0), 227 * _KIB, has_clusters=True, has_wgmma=True)
BLACKWELL = Architecture("sm_100", (10, 0), 227 * _KIB, has_clusters=True)
BLACKWELL_CONSUMER = Architecture("sm_120", (12, 0), 99 * _KIB, mma_products=512.0)

ARCHITECTURES = {
    one.name: one for one in (AMPERE, AMPERE_CONSUMER, ADA, HOPPER, BLACKWELL, BLACKWELL_CONSUMER)
}
"""Every architecture by name, oldest first."""


def names_where(has: Callable[[Architecture], bool]) -> tuple[str, ...]:
    """Return the names of the architectures with some feature."""
    return tuple(name for name, one in ARCHITECTURES.items() if has(one))


ALL_ARCHITECTURES = tuple(ARCHITECTURES)
WITH_WGMMA = names_where(lambda one: one.has_wgmma)
WITH_CLUSTERS = names_where(lambda one: one.has_clusters)
WITH_FP8 = names_where(lambda one: one.has_fp8)


def name_of(capability: tuple[int, int]) -> str:
    """Return the compilation target of a compute capability, also of one that is not listed."""
    for one in ARCHITECTURES.values():
        if one.capability == capability:
            return one.name
    major, minor = capability
    return f"sm_{major}{minor}"
