"""The gradient of an image at another size as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.gradient_problem import GradientProblem
from escalade.ops.upsample2d.problem import Upsample2dProblem


@dataclass(frozen=True)
class Upsample2dBackwardProblem(GradientProblem[Upsample2dProblem]):
    """dx of y = upsample2d(x), from `gradient`, which is that of y; the result is buffer `y`.

    A pixel's gradient is the sum of those of the outputs that are made of it, by its weights in them.
    """

    def __post_init__(self) -> None:
        self.follow("upsample2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch:
            raise UnsupportedError(
                f"{f.name} has pixels that lie apart; upsample2d_backward takes dense images"
            )

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> Upsample2dBackwardProblem:
        """The problem of an upsampling's name, such as `64_56to112_b32_bilinear`."""
        return Upsample2dBackwardProblem(Upsample2dProblem.parse(name, dtype, layout))

    @property
    def most_outputs(self) -> tuple[int, int]:
        """Outputs down and along that are made of one pixel, at most."""
        return self.most_outputs_of(1, 1)

    def most_outputs_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Outputs down and along between the first and the last that are made of a tile of pixels, at most.

        Their places are in as many pixels as the tile has, and one less than there are taps; rounding adds one at
        either end, unless no place is rounded.
        """
        f = self.forward
        more = 0 if self._exact and not f.corners else 2
        down, along = (
            min(outputs, math.ceil((pixels - 1 + f.taps) / step) + more) if step else outputs
            for pixels, step, outputs in zip((rows, columns), f.steps, f.output, strict=True)
        )
        return down, along

    @property
    def _exact(self) -> bool:
        """Whether sizes are powers of two apart, so that no place is rounded."""
        f = self.forward
        sizes = zip(f.steps, (f.height, f.width), f.output, strict=True)
        return all(
            step * outputs == size and math.frexp(step)[0] == 0.5 and step <= 1
            for step, size, outputs in sizes
        )

    @property
    def even(self) -> tuple[int, int] | None:
        """Outputs down and along that are copies of each pixel, where these are powers of two for the nearest pixel, so
        that no place is rounded; None otherwise."""
        f = self.forward
        if f.taps > 1 or not self._exact:
            return None
        return f.output[0] // f.height, f.output[1] // f.width

    @property
    def bytes(self) -> int:
        f = self.forward
        return (f.elements + f.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """The weights' error, and that of a running sum of n independent terms, each addition off by up to 2^-24 of
        it: a random walk."""
        return self.forward.rounding + 2.0**-24 * math.sqrt(1 + math.prod(self.most_outputs) / 6)
