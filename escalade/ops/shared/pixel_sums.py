"""Work split of a CTA over the pixels of NHWC images: the parameters of kernels/common/pixel_sums.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.grid import ceil_div

_WARP = 32
_LINE_BYTES = 128
_MOST_AHEAD = 8  # loads in flight per thread
_PARTIAL_LINES = 1.15  # time factor of DRAM where several CTAs read parts of a cache line


def line_factor(slices: int, slice_bytes: int) -> float:
    """Return how much longer memory takes to read pixels in `slices` slices of `slice_bytes` bytes."""
    return _PARTIAL_LINES if slices > 1 and slice_bytes % _LINE_BYTES else 1.0


@dataclass(frozen=True)
class PixelSums:
    threads: int
    columns: int
    """Packs of channels in the CTA's slice."""
    pixels: int
    """Pixels per image that the CTA reads."""
    images: int = 1

    @property
    def lanes(self) -> int:
        """Threads that read one pixel's slice together: a power of two if several fit into a warp."""
        if self.columns > _WARP // 2:
            return min(self.columns, self.threads)
        return 1 << (self.columns - 1).bit_length()

    @property
    def groups(self) -> int:
        """Threads that share the pixels of one pack and image; 0 if there are too many images."""
        return self.threads // self.lanes // self.images

    @property
    def shuffled(self) -> bool:
        """True if threads of a warp with the same channels reduce by shuffles."""
        return self.lanes <= _WARP // 2

    @property
    def sums(self) -> int:
        """Partial sums per channel and image in shared memory: one per warp after shuffles."""
        return self.groups * self.lanes // _WARP if self.shuffled else self.groups

    @property
    def _each(self) -> int:
        """Pixels per thread."""
        return ceil_div(self.pixels, self.groups)

    @property
    def _rounds(self) -> int:
        """Passes of a thread over its pixels, one per pack of channels."""
        return ceil_div(self.columns, self.lanes)

    @property
    def ahead(self) -> int:
        """Loads in flight per thread, the same in every turn."""
        return ceil_div(self._each, ceil_div(self._each, _MOST_AHEAD))

    @property
    def turns(self) -> int:
        """Times that a thread waits for its loads."""
        return self._rounds * ceil_div(self._each, self.ahead)

    def waits(self, resident: int) -> float:
        """Waits of an SM with `resident` such CTAs: after the first turn, other CTAs hide the latency."""
        return 1 + (self.turns - 1) / resident

    @property
    def slots(self) -> int:
        """Packs that all threads could load if each were as busy as the busiest."""
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
