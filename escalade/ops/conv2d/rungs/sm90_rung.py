"""What all rungs have in common that leave windows to Hopper's TMA (im2col) and products to wgmma."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.device.architecture import WITH_WGMMA
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, copied_channels
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.tensor_core import product_tolerance
from escalade.ops.conv2d.rungs.tma_windows import Windows

SLAB_RATE = 32
"""Pixels times filters whose slab, 128 bytes of k, a multiprocessor multiplies in a cycle, whatever the type."""
PROMOTE_SLABS = {"fp8": 1}
"""Slabs whose sum is left to the tensor cores, where they do not keep fp32's bits: in FP8 about 14, and fp16 results
that round to within 2.0e-4 are then off by 2.4e-4 with one slab, 2.9e-4 with two and 4.0e-4 with four."""
FEW_PRODUCTS = 16384
"""Products of a sum up to which some inputs lose clearly more to truncation than the mean."""


def slabs_of(problem: Conv2dProblem) -> int:
    """Slabs that the sum of an output pixel goes through."""
    shortcut = Windows.of_shortcut(problem).slabs if problem.shortcut_channels else 0
    return Windows.of(problem).slabs + shortcut


def truncated_tolerance(problem: Conv2dProblem, tolerance: float) -> float:
    """TF32 truncates x, by up to 2^-10, and has the weights rounded, by up to 2^-11: see `prepare_for_copies`."""
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
    def takes_shortcut(self) -> bool:
        return True

    @property
    def takes_fp8(self) -> bool:
        return "fp8" in self.dtypes

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        sentence = self.only_nhwc(p)
        if sentence is not None:
            return sentence
        if p.dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(self.dtypes)}, not {p.dtype}"
        copied = COPY_BYTES // p.element_bytes
        if p.dtype == "fp8" and p.channels % copied:
            return f"{self.name} takes multiples of {copied} channels in fp8, not {p.channels}"
        if p.shortcut_channels % copied:
            return f"{self.name} copies {copied} channels at once; the shortcut's {p.shortcut_channels} are no multiple"
        sentence = Windows.of(p).unsupported(self.name)
        if sentence is None and p.shortcut_channels:
            sentence = Windows.of_shortcut(p).unsupported(self.name)
        return sentence

    @abstractmethod
    def clocks(self, problem: Conv2dProblem, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        """Channels that no copy divides are padded first, by a launch that reads x and writes it."""
        p, channels = problem, copied_channels(problem)
        main = self.card.microseconds(self.clocks(p, config), p.traffic)
        if channels == p.channels:
            return main
        return main + self.card.microseconds(
            0, p.batch * p.height * p.width * (p.channels + channels) * p.element_bytes
        )

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        return truncated_tolerance(problem, super().tolerance(problem, peer_error))
