"""Channel rows held in registers: one cluster per slice of channels, whose CTAs share the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from escalade.device.architecture import WITH_WGMMA
from escalade.ops.base.dtypes import VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared.channels import Channelwise, channels_innermost

_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Rows per thread that kernels are compiled for."""
_COLUMNS = (4, 8, 2)
"""Packs of channels per slice: two sectors, a cache line, or one sector."""
_START_US = 1.3  # from the launch to the first loads' arrival, besides the launch itself
EXCHANGE_US = 0.7
"""Microseconds of one reduction over a cluster: shuffles, shared memory, and a cluster barrier."""
_RATE = 14.0  # bytes per clock and SM while all loads are waited for; measured on 3 to 6 MB tensors
_SECTOR = 32
_NARROW = 1.3  # slowdown where a slice is one sector wide


@dataclass(frozen=True)
class ResidentConfig(Config):
    threads: int
    columns: int
    """Packs of channels per slice."""
    blocks: int
    """CTAs per cluster."""
    steps: int
    """Most rows per thread."""


class Rows(Channelwise, Protocol):
    """Images whose channels have `count` elements each."""

    @property
    def count(self) -> int: ...


R = TypeVar("R", bound=Rows)


def slices(problem: Rows, config: ResidentConfig) -> int:
    """Return the clusters of the launch."""
    return problem.channels // (widest_vector(problem.dtype, problem.channels) * config.columns)


@dataclass(frozen=True)
class ResidentRung(Rung[R, ResidentConfig]):
    """One launch of clusters that hold their slices of the images in registers."""

    most_steps: ClassVar[Mapping[int, int]]
    """Most rows per thread that fit the registers, by threads per CTA."""
    exchanges: ClassVar[int]
    """Reductions over a cluster."""

    architectures = WITH_WGMMA

    def supports(self, problem: R) -> str | None:
        if not channels_innermost(problem):
            return f"{self.name} holds rows of channels, and needs layout nhwc, not {problem.layout}"
        if widest_vector(problem.dtype, problem.channels, problem.count * problem.channels) < 4:
            return f"{self.name} needs a multiple of 4 channels, not {problem.channels}"
        if next(self._offered(problem), None) is None:
            return f"{problem.count} rows of {problem.channels} channels exceed the registers of all clusters"
        return None

    def configs(self, problem: R) -> tuple[ResidentConfig, ...]:
        return tuple(sorted(self._offered(problem), key=lambda config: self.estimate(problem, config)))

    def _offered(self, problem: R) -> Iterator[ResidentConfig]:
        """Yield every slice width whose clusters all run at once, with the largest useful cluster."""
        rows, card = problem.count, self.card
        packs = problem.channels // widest_vector(problem.dtype, problem.channels)
        for threads, most_steps in self.most_steps.items():
            for columns in _COLUMNS:
                if packs % columns:
                    continue
                height = threads // columns
                fitting = (
                    blocks
                    for blocks in range(len(card.clusters), 0, -1)
                    if packs // columns <= card.max_active_clusters(blocks)
                    and (blocks == 1 or rows > (blocks - 1) * height)
                )
                blocks = next(fitting, 0)
                if not blocks:
                    continue
                each = ceil_div(rows, blocks * height)
                steps = next((some for some in _STEPS if some >= each), most_steps + 1)
                if steps <= most_steps:
                    yield ResidentConfig(threads, columns, blocks, steps)

    def estimate(self, problem: R, config: ResidentConfig) -> float:
        """Return the time to move the bytes, by DRAM or by the SMs in use, plus latencies."""
        card, moved = self.card, problem.bytes
        narrow = _NARROW if config.columns * VECTOR_BYTES < 2 * _SECTOR else 1.0
        alone = narrow * moved / (slices(problem, config) * config.blocks) / _RATE / card.rates.clock
        waiting = card.rates.launch_us + _START_US + self.exchanges * EXCHANGE_US
        return waiting + max(alone, card.transfer_us(moved))
