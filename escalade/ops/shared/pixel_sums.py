"""How the threads of a block share the pixels of images in NHWC: what kernels/common/pixel_sums.cuh leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.grid import ceil_div

_WARP = 32
_LINE_BYTES = 128
_MOST_AHEAD = 8
"""Pixels of a thread that are under way at once, at most."""
_PARTS_OF_LINES = 1.15
"""Times as long as whole lines take out of memory, where several blocks read parts of them."""


def line_factor(slices: int, slice_bytes: int) -> float:
    """How much longer memory takes where pixels are read in so many slices of so many bytes."""
    return _PARTS_OF_LINES if slices > 1 and slice_bytes % _LINE_BYTES else 1.0


@dataclass(frozen=True)
class PixelSums:
    threads: int
    columns: int
    """Packs of channels of the block's slice."""
    pixels: int
    """Pixels of an image that the block has."""
    images: int = 1

    @property
    def lanes(self) -> int:
        """Threads that read a pixel's slice side by side: a power of two where several fit into a warp."""
        if self.columns > _WARP // 2:
            return min(self.columns, self.threads)
        return 1 << (self.columns - 1).bit_length()

    @property
    def groups(self) -> int:
        """Threads that share the pixels of a pack of channels of one image; none if there are too many images."""
        return self.threads // self.lanes // self.images

    @property
    def shuffled(self) -> bool:
        """Whether the threads of a warp with the same channels add up by shuffles."""
        return self.lanes <= _WARP // 2

    @property
    def sums(self) -> int:
        """Sums of a channel of one image that meet in shared memory: one a warp where its threads have added up."""
        return self.groups * self.lanes // _WARP if self.shuffled else self.groups

    @property
    def _each(self) -> int:
        """Pixels of a thread."""
        return ceil_div(self.pixels, self.groups)

    @property
    def _rounds(self) -> int:
        """How often a thread goes over its pixels, for another pack of channels."""
        return ceil_div(self.columns, self.lanes)

    @property
    def ahead(self) -> int:
        """Loads that a thread has under way: as many in every turn."""
        return ceil_div(self._each, ceil_div(self._each, _MOST_AHEAD))

    @property
    def turns(self) -> int:
        """How often a thread waits for its loads."""
        return self._rounds * ceil_div(self._each, self.ahead)

    def waits(self, resident: int) -> float:
        """How often a multiprocessor with so many of these blocks waits: behind the first turn others go on."""
        return 1 + (self.turns - 1) / resident

    @property
    def slots(self) -> int:
        """Packs that the threads could read in that time, each as many as the busiest."""
        return self.threads * self.turns * self.ahead

    @property
    def constants(self) -> dict[str, Constant]:
        return {
            "LANES": self.lanes,
            "GROUPS": self.groups,
            "SUMS": self.sums,
            "SHUFFLED": self.shuffled,
            "AHEAD": self.ahead,
        }
