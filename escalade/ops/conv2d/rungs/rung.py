"""What every rung of conv2d has to say about a problem before its own limits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import C, Rung
from escalade.ops.conv2d.problem import Conv2dProblem


@dataclass(frozen=True)
class Conv2dRung(Rung[Conv2dProblem, C]):
    @property
    def takes_shortcut(self) -> bool:
        """Whether its kernel goes on from x to a second image."""
        return False

    @property
    def takes_fp8(self) -> bool:
        """Whether its kernel multiplies e4m3 and knows of units."""
        return False

    @property
    def takes_prologue(self) -> bool:
        """Whether its kernel multiplies what an expression makes of x."""
        return False

    @property
    def takes_pool(self) -> bool:
        """Whether its kernel takes the maxima of windows of its results, and finds their places."""
        return False

    @property
    def takes_apart(self) -> tuple[str, ...]:
        """The buffers whose pixels its kernel takes apart from each other."""
        return ()

    def supports(self, problem: Conv2dProblem) -> str | None:
        if sentence := unsupported_pitch(self.name, problem, self.takes_apart):
            return sentence
        if problem.shortcut_channels and not self.takes_shortcut:
            return f"{self.name} convolves one image; a shortcut of {problem.shortcut_channels} channels is a second"
        if problem.dtype == "fp8" and not self.takes_fp8:
            return f"{self.name} has no products of e4m3; fp8 is for persistent and fused_epilogue"
        if problem.prologue and not self.takes_prologue:
            return f"{self.name} multiplies x as it is, not {problem.prologue!r} of it"
        if problem.pools and not self.takes_pool:
            return f"{self.name} writes each of its results, not the maxima of windows of them"
        if problem.output and problem.dtype != "fp8":
            return f"{self.name} stores y as {problem.dtype}; an output of {problem.output} is for problems in fp8"
        return self.limits(problem)

    def only_nhwc(self, problem: Conv2dProblem) -> str | None:
        """What rungs for one group and layout say to others."""
        if problem.groups != 1:
            return f"{self.name} takes groups=1, not {problem.groups}"
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        return None

    def clocks(self, problem: Conv2dProblem, config: C) -> float | None:
        """The clocks, about, of the busiest multiprocessor; what memory takes need not be in them."""
        return None

    def estimate(self, problem: Conv2dProblem, config: C) -> float | None:
        clocks = self.clocks(problem, config)
        return None if clocks is None else self.card.microseconds(clocks, problem.traffic)

    @abstractmethod
    def limits(self, problem: Conv2dProblem) -> str | None:
        """What is beyond the rung, like `supports`, among problems of the kind that it takes."""


def unsupported_reach(problem: Conv2dProblem, tile_m: int, unit: int) -> str | None:
    """Offsets within a tile's images are counted in 32 bits, in units of `unit` elements."""
    image = max(problem.channels, problem.x_pitch) * problem.height * problem.width
    images = tile_m // (problem.output_height * problem.output_width) + 2
    if images * image // unit >= 2**31 or problem.output_pixels >= 2**31 - tile_m:
        return f"{tile_m} output pixels span {images} images of {image} elements, too many for 32-bit offsets"
    return None
