"""Base class of the conv2d rungs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import C, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Conv2dRung(Rung[Conv2dProblem, C]):
    @property
    def supports_shortcut(self) -> bool:
        """True if the kernel continues with the shortcut image."""
        return False

    @property
    def quantized_dtypes(self) -> tuple[str, ...]:
        """Dtypes of one byte that the kernel multiplies, with scales."""
        return ()

    @property
    def supports_prologue(self) -> bool:
        """True if the kernel applies an expression to x first."""
        return False

    @property
    def supports_pool(self) -> bool:
        """True if the kernel max-pools its results and finds the argmax indices."""
        return False

    @property
    def supports_mean(self) -> bool:
        """True if the kernel also averages its results."""
        return False

    @property
    def supports_vectors(self) -> bool:
        """True if the activation may use vectors."""
        return False

    @property
    def supports_statistics(self) -> bool:
        """True if the kernel finds the mean and variance of its results."""
        return False

    @property
    def pitched_buffers(self) -> tuple[str, ...]:
        """Buffers that may have a pitch."""
        return ()

    def supports(self, problem: Conv2dProblem) -> str | None:
        if reason := unsupported_pitch(self.name, problem, self.pitched_buffers):
            return reason
        if problem.shortcut_channels and not self.supports_shortcut:
            return f"{self.name} supports no shortcut; this one has {problem.shortcut_channels} channels"
        if problem.is_quantized and problem.dtype not in self.quantized_dtypes:
            return f"{self.name} does not support {problem.dtype}; persistent does"
        if problem.prologue and not self.supports_prologue:
            return f"{self.name} supports no prologue, not {problem.prologue!r}"
        if problem.pools and not self.supports_pool:
            return f"{self.name} supports no pool, not {problem.pool}"
        if problem.mean and not self.supports_mean:
            return f"{self.name} supports maxima in pools, not means"
        if activation.vectors_of(problem.activation) and not self.supports_vectors:
            return f"{self.name} supports activations of x and residual, not {problem.activation!r}"
        if problem.statistics and problem.is_quantized:
            return (
                f"{self.name} computes mean and variance of results in 16 and 32 bits, not in {problem.dtype}"
            )
        if problem.statistics and not self.supports_statistics:
            return f"{self.name} does not compute mean and variance of its results; batch_statistics does"
        if problem.output and not problem.is_quantized:
            return (
                f"{self.name} stores y as {problem.dtype}; output {problem.output} is for dtypes fp8 and int8"
            )
        return self.limits(problem)

    def only_nhwc(self, problem: Conv2dProblem) -> str | None:
        """Return the reason why a rung for one group in NHWC does not support the problem."""
        if problem.groups != 1:
            return f"{self.name} takes groups=1, not {problem.groups}"
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        return None

    def clocks(self, problem: Conv2dProblem, config: C) -> float | None:
        """Estimate the clocks of the busiest SM; DRAM time need not be included."""
        return None

    def estimate(self, problem: Conv2dProblem, config: C) -> float | None:
        clocks = self.clocks(problem, config)
        return None if clocks is None else self.card.microseconds(clocks, problem.traffic)

    @abstractmethod
    def limits(self, problem: Conv2dProblem) -> str | None:
        """Like `supports`, for what the base class does not check."""


def unsupported_reach(problem: Conv2dProblem, tile_m: int, unit: int) -> str | None:
    """Return why offsets within the images of a tile overflow 32 bits, counted in units of `unit` elements."""
    image = max(problem.channels, problem.x_pitch) * problem.height * problem.width
    images = tile_m // (problem.output_height * problem.output_width) + 2
    if images * image // unit >= 2**31 or problem.output_pixels >= 2**31 - tile_m:
        return f"{tile_m} output pixels span {images} images of {image} elements, too many for 32-bit offsets"
    return None
