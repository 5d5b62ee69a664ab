"""Rows of channels that stay in registers: a cluster of blocks for each slice of channels, which share the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.shared.channels import Channelwise, channels_innermost

_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Rows of a thread that kernels are made for."""
_COLUMNS = (4, 8, 2)
"""Packs of channels of a slice: two sectors of memory, a cache line, or one sector."""
_START_US = 1.3
"""Microseconds from a launch to its first loads' arrival, besides its own."""
EXCHANGE_US = 0.7
"""Microseconds in which the blocks of a cluster add up: shuffles, shared memory, and a barrier of the cluster."""


_RATE = 14.0
"""Bytes that a multiprocessor moves in a clock while it waits for all of them: as measured on tensors of 3 to 6 MB."""
_SECTOR = 32
_NARROW = 1.3
"""How much longer it takes where a row has one sector of memory in a slice."""


@dataclass(frozen=True)
class ResidentConfig(Config):
    threads: int
    columns: int
    """Packs of channels side by side."""
    blocks: int
    """Blocks of a cluster."""
    steps: int
    """Rows of a thread, at most."""


def slices(problem: Channelwise, config: ResidentConfig) -> int:
    """Clusters of the launch."""
    return problem.channels // (widest_vector(problem.dtype, problem.channels) * config.columns)


def offered(problem: Channelwise, rows: int, card: Card, most: Mapping[int, int]) -> Iterable[ResidentConfig]:
    """Every width of a slice that has a cluster on the card at once, with the most blocks that are of use.

    `most` has for each number of threads the rows of a thread that there are registers for.
    """
    packs = problem.channels // widest_vector(problem.dtype, problem.channels)
    for threads, most_steps in most.items():
        for columns in _COLUMNS:
            if packs % columns:
                continue
            height = threads // columns
            fitting = (
                blocks
                for blocks in range(len(card.clusters), 0, -1)
                if packs // columns <= card.clusters_at_once(blocks)
                and (blocks == 1 or rows > (blocks - 1) * height)
            )
            blocks = next(fitting, 0)
            if not blocks:
                continue
            steps = next((some for some in _STEPS if some >= ceil_div(rows, blocks * height)), most_steps + 1)
            if steps <= most_steps:
                yield ResidentConfig(threads, columns, blocks, steps)


def refusal(name: str, problem: Channelwise, rows: int, card: Card, most: Mapping[int, int]) -> str | None:
    """Why no cluster keeps the rows of a slice, if it is so."""
    if not channels_innermost(problem):
        return f"{name} keeps rows of channels; in layout {problem.layout} these are planes"
    if widest_vector(problem.dtype, problem.channels, rows * problem.channels) < 4:
        return f"{name} takes channels by four and more, and {problem.channels} are no multiple of that"
    if next(iter(offered(problem, rows, card, most)), None) is None:
        return (
            f"{rows} rows of {problem.channels} channels are more than the registers of clusters keep at once"
        )
    return None


def estimate(problem: Channelwise, config: ResidentConfig, card: Card, moved: int, exchanges: int) -> float:
    """The bytes at the rate of the card, or of the multiprocessors that have any, and what is waited for."""
    narrow = _NARROW if config.columns * VECTOR_BYTES < 2 * _SECTOR else 1.0
    alone = narrow * moved / (slices(problem, config) * config.blocks) / _RATE / card.rates.clock
    waiting = card.rates.launch_us + _START_US + exchanges * EXCHANGE_US
    return waiting + max(alone, card.passing(moved))
