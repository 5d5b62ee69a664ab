"""Base class of the rungs with TMA im2col copies and wgmma."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, copied_channels
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.tensor_core import product_tolerance
from escalade.ops.conv2d.rungs.tma_windows import Windows

K_TILE_RATE = 32
"""Pixels times filters per cycle and SM for one k-tile (128 bytes of k), in any dtype."""
PROMOTE_K_TILES = {"fp8": (2, 1)}
"""Choices of k-tiles summed in the tensor cores before promotion to fp32 registers, where accumulators have fewer bits
than fp32. FP8 keeps about 14: fp16 results that round to within 2.0e-4 are off by 2.4e-4 with one k-tile, 2.9e-4 with
two and 4.0e-4 with four. Results in FP8 round to within 3e-2, so that they need no promotion."""
FEW_PRODUCTS = 16384
"""Up to this many products in all, some inputs lose clearly more to truncation than the mean."""


@lru_cache(1024)
def k_tiles_of(problem: Conv2dProblem) -> int:
    """Return the k-tiles per output tile."""
    shortcut = Windows.of_shortcut(problem).k_tiles if problem.shortcut_channels else 0
    return Windows.of(problem).k_tiles + shortcut


def truncated_tolerance(problem: Conv2dProblem, tolerance: float) -> float:
    """Return the tolerance for a truncated x (2^-10) and rounded weights (2^-11): see `prepare_for_copies`."""
    tolerance = product_tolerance(problem, tolerance)
    few = problem.dtype == "tf32" and problem.output_elements * problem.depth <= FEW_PRODUCTS
    return max(tolerance, 1.5 * 2.0**-10) if few else tolerance


@dataclass(frozen=True)
class HopperRung(Conv2dRung[C]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32", "fp8")

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    @property
    def supports_shortcut(self) -> bool:
        return True

    @property
    def quantized_dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype in QUANTIZED if dtype in self.dtypes)

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if reason := self.only_nhwc(p):
            return reason
        if p.dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(self.dtypes)}, not {p.dtype}"
        copied = COPY_BYTES // p.element_bytes
        if p.is_quantized and p.channels % copied:
            return f"{self.name} takes multiples of {copied} channels in {p.dtype}, not {p.channels}"
        if p.shortcut_channels % copied:
            return f"{self.name} copies {copied} channels at once; the shortcut's {p.shortcut_channels} are no multiple"
        reason = Windows.of(p).unsupported(self.name)
        if reason is None and p.shortcut_channels:
            reason = Windows.of_shortcut(p).unsupported(self.name)
        return reason

    @abstractmethod
    def clocks(self, problem: Conv2dProblem, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        """Add the launch that pads channels, if TMA cannot copy them as they are."""
        p, channels = problem, copied_channels(problem)
        main = self.card.microseconds(self.clocks(p, config), p.traffic)
        if channels == p.channels:
            return main
        return main + self.card.microseconds(
            0, p.batch * p.height * p.width * (p.channels + channels) * p.element_bytes
        )

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        return truncated_tolerance(problem, super().tolerance(problem, peer_error))
