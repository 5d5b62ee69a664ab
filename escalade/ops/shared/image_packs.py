"""Packs of adjacent elements of dense NCHW images, one per thread."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.recipe import Ints
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.problem import P
from escalade.ops.base.rung import ThreadsConfig, ThreadsRung

_MOST = 2**32 - 2**13
"""Kernels count in 32 bits, with the idle threads of the last CTA."""


@dataclass(frozen=True)
class ImagePacks:
    """The launch of `kernels/common/image_packs.cuh`."""

    vector: int
    elements: int
    height: int
    width: int

    @staticmethod
    def of(dtype: str, planes: int, height: int, width: int) -> ImagePacks:
        """Return packs of 16 bytes."""
        return ImagePacks(full_vector(dtype), planes * height * width, height, width)

    @property
    def straddles(self) -> bool:
        """True if a pack may continue in the next row."""
        return self.width % self.vector != 0

    @property
    def count(self) -> int:
        return ceil_div(self.elements, self.vector)

    def grid(self, threads: int) -> int:
        return blocks(self.count, threads)

    def unsupported(self, rung: str, problem_name: str) -> str | None:
        """Return why a rung cannot count these packs, or the elements of packs that straddle rows; None if it can."""
        counted, what = (self.elements, "elements") if self.straddles else (self.count, "packs")
        if counted >= _MOST:
            return f"{rung} counts {what} in 32 bits; {problem_name} has {counted}"
        return None

    @property
    def shape(self) -> Ints:
        width = self.width if self.straddles else self.width // self.vector
        last = self.elements - (self.count - 1) * self.vector
        return Ints((self.count, last, self.height, width, *reciprocal(self.height), *reciprocal(width)))


class PacksRung(ThreadsRung[P]):
    """A rung with one pack per thread."""

    def configs(self, problem: P) -> tuple[ThreadsConfig, ...]:
        """Prefer CTAs of few bytes in memory, and few CTAs in L2: padding 1 GB takes 542 us with 128 threads and 550
        with 256, 17 MB 7.3 and 6.9."""
        sizes = (128, 256, 512) if problem.bytes > self.card.l2_bytes else (256, 128, 512)
        return tuple(map(ThreadsConfig, sizes))


def reciprocal(size: int) -> tuple[int, int, int]:
    """Return the fields of `Reciprocal` in image_packs.cuh, which divide any number of 32 bits by `size`.

    With a power of two 2^s <= size, either 2^(32 + s) / size rounded up divides exactly, or rounded down and applied to
    n + 1: one of the two is within 2^s / size of the quotient, and the other need not be.
    """
    shift = size.bit_length() - 1
    down, rest = divmod(2 ** (32 + shift), size)
    if rest == 0:
        return 2**32 - 1, 2**32 - 1, shift
    return (down, down, shift) if rest <= 2**shift else (down + 1, 0, shift)
