"""Cards that need not be here: by their datasheets, one for each architecture and some besides."""

from __future__ import annotations

from escalade.device.gpu import GpuProperties
from escalade.errors import UnsupportedError
from escalade.ops.base.card import BLOCK_SHARED, H200, SHARED_BYTES, TWIN, Card, derived

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def _by_datasheet(
    name: str,
    architecture: str,
    multiprocessors: int,
    l2_mib: int,
    memory_gib: int,
    mhz: float,
    gigabytes: float,
) -> Card:
    """`gigabytes`: what its memory moves in a second."""
    shared = SHARED_BYTES[architecture]
    return derived(
        GpuProperties(
            name, architecture, multiprocessors, l2_mib * _MIB, shared, shared + BLOCK_SHARED, 64 * _KIB,
            memory_gib * _GIB, mhz, gigabytes * 1e3,
        )
    )  # fmt: skip


A100 = _by_datasheet("NVIDIA A100-SXM4-80GB", "sm_80", 108, 40, 80, 1410, 2039)
A40 = _by_datasheet("NVIDIA A40", "sm_86", 84, 6, 48, 1740, 696)
RTX_4090 = _by_datasheet("NVIDIA GeForce RTX 4090", "sm_89", 128, 72, 24, 2520, 1008)
H100_PCIE = _by_datasheet("NVIDIA H100 PCIe", "sm_90a", 114, 50, 80, 1755, 2039)
B200 = _by_datasheet("NVIDIA B200", "sm_100", 148, 126, 180, 1965, 8000)
RTX_5090 = _by_datasheet("NVIDIA GeForce RTX 5090", "sm_120", 170, 96, 32, 2407, 1792)

_TYPICAL = {card.architecture: card for card in (TWIN, A100, A40, RTX_4090, H200, B200, RTX_5090)}


def typical(architecture: str | None) -> Card:
    """A card of that architecture, for what is chosen or compiled without one; None: the twin's."""
    if architecture not in _TYPICAL:
        known = ", ".join(name for name in _TYPICAL if name)
        raise UnsupportedError(f"no card of architecture {architecture} is described; there are {known}")
    return _TYPICAL[architecture]
