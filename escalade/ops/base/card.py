"""The card: a GPU's properties and throughput, which rungs size grids and tiles by.

Estimates only have to rank candidates. The H200's rates are measured, set by hand from records; `escalade tune --judge`
compares estimates with measured times. Other cards' rates are scaled from them by clocks, SMs and memory bandwidth, as
the driver reports them; on those cards the tuner has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from escalade.device.architecture import ARCHITECTURES, HOPPER
from escalade.device.gpu import GpuProperties, properties_of
from escalade.ops.base.dtypes import ELEMENT_BYTES

SHARED_BYTES = {name: one.shared_bytes for name, one in ARCHITECTURES.items()}
"""Largest shared memory of a CTA, by architecture."""
MIN_SHARED = min(SHARED_BYTES.values())
"""Shared memory that a CTA may use on every supported card."""
HOPPER_SHARED = HOPPER.shared_bytes
"""Shared memory of a CTA on Hopper, for rungs that use wgmma."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the driver reserves per CTA."""


@dataclass(frozen=True)
class CopyRate:
    """L2 bandwidth of one SM, in bytes per clock."""

    together: float
    """Rate while all SMs load."""
    alone: float
    """Rate while few SMs load."""


@dataclass(frozen=True)
class CopyRates:
    """L2 bandwidth of one SM in bytes per clock, fitted per way of copying."""

    loads: float
    """Loads and cp.async by the computing threads."""
    mma_ring: CopyRate
    """cp.async into the stages of an mma.sync pipeline."""
    tma_tile: float
    """TMA into stages that every tile refills."""
    tma_persistent: CopyRate
    """TMA into stages that persistent CTAs keep filling across tiles."""
    tma_gradient: float
    """TMA of two operands that no other CTA reads at the same time: gradients, and fp32 halves."""
    tma_window: float
    """TMA of input windows while the weights stay in shared memory."""
    tma_streamed: CopyRate
    """TMA of input windows and their weights."""
    tma_first: float
    """TMA of the first windows, which all CTAs load at once."""


@dataclass(frozen=True)
class Rates:
    """Throughput of a card, per microsecond or per clock."""

    measured: bool
    """True if measured on this card, False if scaled from an H200."""
    clock: float
    """SM clocks per microsecond, under load."""
    launch_us: float
    """Microseconds between the end of one launch and the first results of the next: measured overhead per step."""
    dram: float
    """Bytes per microsecond of a copy through DRAM."""
    l2: float
    """Bytes per microsecond from L2, for data of the previous launch."""
    l2_holds: float
    """Bytes that a launch may move and still hit L2."""
    fp32: float
    """FLOPs per microsecond on CUDA cores, under load."""
    mma_products: float
    """16-bit multiply-adds per SM and clock with mma.sync."""
    copies: CopyRates


@dataclass(frozen=True)
class Card:
    """A GPU as rungs see it: configs, estimates and grids are computed for a card."""

    name: str
    architecture: str | None
    """Architecture to compile for; None for the twin, which runs kernels of every architecture."""
    multiprocessors: int
    shared_bytes: int
    """Largest shared memory of a CTA."""
    multiprocessor_shared_bytes: int
    """Shared memory of an SM, including `RESERVED_SHARED` per CTA."""
    registers: int
    """Registers per SM."""
    l2_bytes: int
    clusters: tuple[int, ...]
    """Clusters of 1, 2, 3, … CTAs that run at once, one CTA per SM. The CTAs of a cluster share a GPC, so these are
    fewer than SMs / size. Without cluster support: only the first entry."""
    rates: Rates

    @staticmethod
    def of(target: DeviceOrCard) -> Card:
        """Return the card of a device. On the CPU the twin makes the choices of an H200."""
        if isinstance(target, Card):
            return target
        if target.type != "cuda":
            return TWIN
        return _of_gpu(target.index if target.index is not None else torch.cuda.current_device())

    @property
    def busy_blocks(self) -> int:
        """CTAs that keep the card busy: four per SM."""
        return 4 * self.multiprocessors

    @property
    def speed(self) -> float:
        """Clock rate times SMs relative to an H200, to scale rates measured there."""
        return self.multiprocessors * self.rates.clock / (H200.multiprocessors * H200.rates.clock)

    @property
    def memory_speed(self) -> float:
        """DRAM bandwidth relative to an H200, to scale rates measured there."""
        return self.rates.dram / H200.rates.dram

    def tensor_core_rate(self, dtype: str) -> float:
        """FLOPs per microsecond of mma.sync on all SMs; halves when the element size doubles."""
        products = self.rates.mma_products * 2 / ELEMENT_BYTES[dtype]
        return 2 * products * self.multiprocessors * self.rates.clock

    def max_active_clusters(self, blocks: int) -> int:
        """Return the number of clusters of `blocks` CTAs that run at once; 0 if that size is unsupported."""
        return self.clusters[blocks - 1] if blocks <= len(self.clusters) else 0

    def resident_blocks(self, shared_bytes: int) -> int:
        """Return roughly how many CTAs with `shared_bytes` fit on an SM, at least one."""
        return max(1, self.shared_bytes // (shared_bytes + RESERVED_SHARED))

    def copy_rate(self, rate: CopyRate, blocks: int) -> float:
        """Return the L2 bytes per clock of each SM while `blocks` SMs load."""
        return min(rate.alone, rate.together * self.multiprocessors / blocks)

    def transfer_us(self, moved: float) -> float:
        """Microseconds to move `moved` bytes through L2 or, above its capacity, DRAM."""
        return moved / (self.rates.l2 if moved <= self.rates.l2_holds else self.rates.dram)

    def microseconds(self, clocks: float, moved: float, launches: int = 1) -> float:
        """Microseconds of sequential launches, bound by the busiest SM's clocks or by bytes."""
        return launches * self.rates.launch_us + max(clocks / self.rates.clock, self.transfer_us(moved))


DeviceOrCard = torch.device | Card
"""A device of this machine, or the card of one that need not be present."""


def is_gpu(target: DeviceOrCard) -> bool:
    """Return False for the twin."""
    return target.architecture is not None if isinstance(target, Card) else target.type == "cuda"


H200 = Card(
    "NVIDIA H200",
    HOPPER.name,
    multiprocessors=132,
    shared_bytes=HOPPER.shared_bytes,
    multiprocessor_shared_bytes=HOPPER.shared_bytes + RESERVED_SHARED,
    registers=65536,
    l2_bytes=60 << 20,
    clusters=(132, 66, 40, 28, 22, 16, 14, 14),
    rates=Rates(
        measured=True,
        clock=1750.0,
        launch_us=1.5,
        dram=4.2e6,
        l2=7.0e6,
        l2_holds=25e6,
        fp32=60e6,
        mma_products=1100.0,
        copies=CopyRates(
            loads=39.0,
            mma_ring=CopyRate(40.0, 64.0),
            tma_tile=39.0,
            tma_persistent=CopyRate(56.0, 84.0),
            tma_gradient=45.0,
            tma_window=65.0,
            tma_streamed=CopyRate(39.0, 65.0),
            tma_first=19.0,
        ),
    ),
)
"""An H200 SXM: queried properties, measured rates and cluster counts."""
_H200_CLOCK_MHZ = 1980.0  # highest clock by the driver; `Rates.clock` is what remains under load
_H200_MEMORY_RATE = 4.917e6  # bytes per us by memory clock and bus width; a copy reaches `Rates.dram`
TWIN = replace(H200, name="the twin", architecture=None)
"""The twin's card: an H200 that runs kernels of every architecture."""
_MEASURED = {H200.name: H200}


def derive_card(given: GpuProperties) -> Card:
    """Return the card of an unmeasured GPU: an H200's rates scaled by what the driver reports."""
    kind = ARCHITECTURES.get(given.architecture, HOPPER)
    clock = H200.rates.clock * given.clock_mhz / _H200_CLOCK_MHZ
    throughput = given.multiprocessors * clock / (H200.multiprocessors * H200.rates.clock)
    rates = replace(
        H200.rates,
        measured=False,
        clock=clock,
        dram=H200.rates.dram * given.memory_bytes_per_us / _H200_MEMORY_RATE,
        l2=H200.rates.l2 * throughput,
        l2_holds=given.l2_bytes / 2,
        fp32=H200.rates.fp32 * throughput * kind.fp32_lanes / HOPPER.fp32_lanes,
        mma_products=kind.mma_products or H200.rates.mma_products,
    )
    has_clusters = int(given.architecture.removeprefix("sm_").rstrip("a")) >= 90
    clusters = tuple(
        count * given.multiprocessors // H200.multiprocessors
        for count in (H200.clusters if has_clusters else H200.clusters[:1])
    )
    return Card(
        given.name,
        given.architecture,
        given.multiprocessors,
        given.shared_bytes,
        given.multiprocessor_shared_bytes,
        given.registers,
        given.l2_bytes,
        clusters,
        rates,
    )


@cache
def _of_gpu(index: int) -> Card:
    given = properties_of(torch.device("cuda", index))
    known = _MEASURED.get(given.name)
    # A MIG slice has the name of the whole card, but fewer SMs.
    if known is None or known.multiprocessors != given.multiprocessors:
        return derive_card(given)
    return known
