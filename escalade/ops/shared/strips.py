"""Strips of an NCHW image's planes per thread: several outputs along a row, in adjacent rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from escalade.device.recipe import Ints
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config

_WARP = 32


class Planes(Protocol):
    """Images with results of another size."""

    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def output_height(self) -> int: ...
    @property
    def output_width(self) -> int: ...


@dataclass(frozen=True)
class StripConfig(Config):
    rows: int
    columns: int
    """Outputs per thread, down and along."""
    threads: int
    """Target threads per CTA."""

    def threads_for(self, problem: Planes) -> int:
        """Return the threads with outputs."""
        p = problem
        return p.batch * p.channels * ceil_div(p.output_height, self.rows) * (p.output_width // self.columns)


@dataclass(frozen=True)
class Strips:
    """The launch of `kernels/common/strips.cuh`: a CTA has whole rows of several planes, or part of a row."""

    across: int
    planes: int
    chunks: int
    groups: int
    threads: int
    grid: int

    @staticmethod
    def of(problem: Planes, config: StripConfig) -> Strips:
        packs, planes = problem.output_width // config.columns, problem.batch * problem.channels
        # A row with slightly more outputs than threads is not split: most of the second CTA's threads would be idle.
        chunks = 1 if 4 * packs <= 5 * config.threads else ceil_div(packs, config.threads)
        across = packs if chunks == 1 else _WARP * ceil_div(ceil_div(packs, chunks), _WARP)
        together = max(1, min(config.threads // across, planes))
        threads = _WARP * ceil_div(together * across, _WARP)
        groups = ceil_div(problem.output_height, config.rows)
        grid = chunks * groups * ceil_div(planes, together)
        return Strips(across, together, chunks, groups, threads, grid)

    @property
    def shape(self) -> Ints:
        return Ints((self.across, self.planes, self.chunks, self.groups))
