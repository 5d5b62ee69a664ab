"""A card: what a GPU has, as its driver says, and what it does in a microsecond: what rungs size grids and tiles by.

Estimates only have to put candidates in order. The H200's rates are measured, set by hand from records: `escalade tune
--judge` shows for every rung how its measured times compare with its estimates. Other cards' rates are derived from
them and from what the driver reports of clocks, multiprocessors and memory; there the tuner has the last word.
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
LEAST_SHARED = min(SHARED_BYTES.values())
"""The shared memory that a block may have on every card since Ampere."""
HOPPER_SHARED = HOPPER.shared_bytes
"""The shared memory of a block on the architecture that rungs with wgmma are for."""
BLOCK_SHARED = 1024
"""Bytes of shared memory that every block takes besides those it asks for."""


@dataclass(frozen=True)
class CopyRate:
    """Bytes that a multiprocessor gets from L2 in a clock."""

    together: float
    """The rate when all multiprocessors ask."""
    alone: float
    """The rate when few do."""


@dataclass(frozen=True)
class CopyRates:
    """Bytes that a multiprocessor gets from L2 in a clock, by how a kernel copies: what fitted its times."""

    loads: float
    """Loads and cp.async by the threads that compute."""
    mma_ring: CopyRate
    """cp.async into the stages of mma.sync."""
    tma_tile: float
    """TMA into stages that are filled anew for every tile."""
    tma_persistent: CopyRate
    """TMA into stages that persistent blocks fill over the ends of tiles."""
    tma_gradient: float
    """TMA into stages of two operands that no other block reads at the time: gradients, and halves of fp32."""
    tma_window: float
    """TMA of windows whose weights stay in shared memory."""
    tma_streamed: CopyRate
    """TMA of windows and of the weights that follow them."""
    tma_first: float
    """TMA of the first windows, which all blocks begin with at once."""


@dataclass(frozen=True)
class Rates:
    """What a card does in a microsecond, or in a clock."""

    measured: bool
    """Whether these are figures of this very card; derived from an H200's otherwise."""
    clock: float
    """Clocks of a multiprocessor in a microsecond, under load."""
    launch_us: float
    """Microseconds from the end of one launch to the first results of the next: measured steps of a network take that
    much more than their clocks."""
    dram: float
    """Bytes in a microsecond, as a copy moves them."""
    l2: float
    """Bytes in a microsecond of what the L2 cache holds since the launch before."""
    l2_holds: float
    """Bytes that a launch may move and find in L2."""
    fp32: float
    """Operations in a microsecond on CUDA cores, under load."""
    mma_products: float
    """Multiply-adds of 16-bit elements that a multiprocessor does by mma.sync in a clock."""
    copies: CopyRates


@dataclass(frozen=True)
class Card:
    """A GPU as rungs see it: the object that configs, estimates and grids are made for."""

    name: str
    architecture: str | None
    """What kernels are compiled for; None: the twin, which runs the kernels of every architecture."""
    multiprocessors: int
    shared_bytes: int
    """The shared memory that a block may have at most."""
    multiprocessor_shared_bytes: int
    """The shared memory that the blocks of a multiprocessor have together, each with `BLOCK_SHARED` of its own."""
    registers: int
    """Registers of a multiprocessor."""
    l2_bytes: int
    clusters: tuple[int, ...]
    """How many clusters of one block, of two, and so on run at once, one block a multiprocessor: their blocks are
    neighbours, so there are fewer than multiprocessors would allow. Without clusters: only the first."""
    rates: Rates

    @staticmethod
    def of(place: Place) -> Card:
        """The card of a device, asked once; on the CPU the twin runs what an H200 would."""
        if isinstance(place, Card):
            return place
        if place.type != "cuda":
            return TWIN
        return _of_gpu(place.index if place.index is not None else torch.cuda.current_device())

    @property
    def filling(self) -> int:
        """Blocks that keep the card busy: four on each multiprocessor."""
        return 4 * self.multiprocessors

    @property
    def speed(self) -> float:
        """Clocks of all multiprocessors in a microsecond, in those of an H200: scales rates measured there."""
        return self.multiprocessors * self.rates.clock / (H200.multiprocessors * H200.rates.clock)

    @property
    def memory_speed(self) -> float:
        """Bytes that memory moves in a microsecond, in those of an H200: scales rates measured there."""
        return self.rates.dram / H200.rates.dram

    def tensor_core_rate(self, dtype: str) -> float:
        """Operations of a dtype that all tensor cores do in a microsecond by mma.sync: fewer of longer operands."""
        products = self.rates.mma_products * 2 / ELEMENT_BYTES[dtype]
        return 2 * products * self.multiprocessors * self.rates.clock

    def clusters_at_once(self, blocks: int) -> int:
        """Clusters of so many blocks that run at once; none if the card has no clusters of that size."""
        return self.clusters[blocks - 1] if blocks <= len(self.clusters) else 0

    def blocks_with(self, shared_bytes: int) -> int:
        """Blocks with so much shared memory that a multiprocessor holds at once, about; one that fits at all is one."""
        return max(1, self.shared_bytes // (shared_bytes + BLOCK_SHARED))

    def copy_rate(self, rate: CopyRate, blocks: int) -> float:
        """Bytes that each multiprocessor gets from L2 in a clock when so many ask."""
        return min(rate.alone, rate.together * self.multiprocessors / blocks)

    def passing(self, moved: float) -> float:
        """Microseconds in which so many bytes are moved."""
        return moved / (self.rates.l2 if moved <= self.rates.l2_holds else self.rates.dram)

    def microseconds(self, clocks: float, moved: float, launches: int = 1) -> float:
        """Launches one after the other: the busiest multiprocessor's clocks, or the bytes if they take longer."""
        return launches * self.rates.launch_us + max(clocks / self.rates.clock, self.passing(moved))


Place = torch.device | Card
"""Where kernels are to run: a device that is here, or a card that need not be."""


def is_gpu(place: Place) -> bool:
    """Whether kernels run on a GPU there, and not on the twin."""
    return place.architecture is not None if isinstance(place, Card) else place.type == "cuda"


H200 = Card(
    "NVIDIA H200",
    HOPPER.name,
    multiprocessors=132,
    shared_bytes=HOPPER.shared_bytes,
    multiprocessor_shared_bytes=HOPPER.shared_bytes + BLOCK_SHARED,
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
"""An H200 SXM: queried properties, and rates and clusters as measured."""
_H200_CLOCK_MHZ = 1980.0
"""What an H200's driver reports as its highest clock, of which `Rates.clock` is what is left under load."""
_H200_MEMORY_RATE = 4.917e6
"""Bytes that an H200's memory clock and bus width come to in a microsecond, of which a copy moves `Rates.dram`."""
TWIN = replace(H200, name="the twin", architecture=None)
"""The twin's card: choices without a GPU are an H200's, from the kernels of all architectures."""
_MEASURED = {H200.name: H200}


def derived(given: GpuProperties) -> Card:
    """The card of a GPU that nothing was measured on: an H200's rates, scaled by what the driver reports."""
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
    if (
        known is None or known.multiprocessors != given.multiprocessors
    ):  # a part of a card has its name, and fewer
        return derived(given)
    return known
