"""The gradient of a maximum over windows as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.gradient_problem import GradientProblem
from escalade.ops.max_pool2d.problem import MaxPool2dProblem, require_bytes_for_places
from escalade.ops.shared.windowed import sharing

_MASK, _STORED = "_mask", "_stored"


@dataclass(frozen=True)
class MaxPool2dBackwardProblem(GradientProblem[MaxPool2dProblem]):
    """dx of y = max_pool2d(x), from `gradient`, which is that of y, and x; the result is buffer `y`.

    An output's gradient goes to the pixel that its maximum comes from: the first of equals, the last of NaNs. With
    `mask`, where x came out of a ReLU, the result is the gradient of what went into the ReLU: none where x is not
    positive. With `stored`, buffer `places` is there instead of x: for each output the place of its maximum in the
    window, row by row, in one byte, or 255 where a ReLU has cut it off.
    """

    mask: bool = False
    stored: bool = False

    def __post_init__(self) -> None:
        self.follow("max_pool2d_backward", DTYPES)
        f = self.forward
        if f.x_pitch or f.y_pitch or f.places:
            raise UnsupportedError(
                f"{f.name} has pixels that lie apart, or a second result; max_pool2d_backward takes the pool's windows "
                "and dense images"
            )
        if self.mask and self.stored:
            raise UnsupportedError(
                f"{f.name} with a mask and stored places: the places say themselves where a ReLU has cut a maximum off"
            )
        if self.stored:
            require_bytes_for_places(f.kernel)

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> MaxPool2dBackwardProblem:
        """The problem of a name such as `64_112_k3s2p1_b256_mask`: the pool's, then _mask behind a ReLU, or _stored."""
        pool = name.removesuffix(_STORED).removesuffix(_MASK)
        return MaxPool2dBackwardProblem(
            MaxPool2dProblem.parse(pool, dtype, layout), mask=_MASK in name, stored=name.endswith(_STORED)
        )

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        return f"{self.forward.name}{_MASK * self.mask}{_STORED * self.stored}"

    @property
    def bytes(self) -> int:
        f = self.forward
        written = f.elements * ELEMENT_BYTES[self.dtype]
        if self.stored:
            return written + f.output_elements * (ELEMENT_BYTES[self.dtype] + 1)
        return written + f.bytes

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk. Where windows do
        not overlap, nothing is computed."""
        terms = sharing(self.forward)
        return 2.0**-24 * math.sqrt(1 + terms / 6) if terms > 1 else 0.0
