"""Cards by datasheet, for planning without the GPU: one per architecture, and some more."""

from __future__ import annotations

from escalade.device.architecture import (
    ADA,
    AMPERE,
    AMPERE_CONSUMER,
    BLACKWELL,
    BLACKWELL_CONSUMER,
    HOPPER,
    Architecture,
)
from escalade.device.gpu import GpuProperties
from escalade.errors import UnsupportedError
from escalade.ops.base.card import H200, RESERVED_SHARED, TWIN, Card, derive_card

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def _by_datasheet(
    name: str,
    architecture: Architecture,
    multiprocessors: int,
    l2_mib: int,
    memory_gib: int,
    mhz: float,
    bandwidth: float,
) -> Card:
    """`bandwidth` is that of its memory, in GB/s."""
    shared = architecture.shared_bytes
    return derive_card(
        GpuProperties(
            name, architecture.name, multiprocessors, l2_mib * _MIB, shared, shared + RESERVED_SHARED, 64 * _KIB,
            memory_gib * _GIB, mhz, bandwidth * 1e3,
        )
    )  # fmt: skip


A100 = _by_datasheet("NVIDIA A100-SXM4-80GB", AMPERE, 108, 40, 80, 1410, 2039)
A40 = _by_datasheet("NVIDIA A40", AMPERE_CONSUMER, 84, 6, 48, 1740, 696)
RTX_4090 = _by_datasheet("NVIDIA GeForce RTX 4090", ADA, 128, 72, 24, 2520, 1008)
H100_PCIE = _by_datasheet("NVIDIA H100 PCIe", HOPPER, 114, 50, 80, 1755, 2039)
B200 = _by_datasheet("NVIDIA B200", BLACKWELL, 148, 126, 180, 1965, 8000)
RTX_5090 = _by_datasheet("NVIDIA GeForce RTX 5090", BLACKWELL_CONSUMER, 170, 96, 32, 2407, 1792)

_TYPICAL = {card.architecture: card for card in (TWIN, A100, A40, RTX_4090, H200, B200, RTX_5090)}


def typical_card(architecture: str | None) -> Card:
    """Return a card of that architecture, to plan or compile without one; None is the twin."""
    if architecture not in _TYPICAL:
        known = ", ".join(name for name in _TYPICAL if name)
        raise UnsupportedError(f"no card of architecture {architecture} is described; known: {known}")
    return _TYPICAL[architecture]
