"""The mean over windows as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.pitch import read_pitches, spell_pitches
from escalade.ops.shared import prologue
from escalade.ops.shared.windowed import WINDOWS_NAME, WindowedImages, check_windows, read_windows

_NAME = re.compile(
    rf"{WINDOWS_NAME}_b(?P<batch>\d+)(?P<ceil>_ceil)?(?P<inside>_inside)?(_by(?P<divisor>\d+))?"
    + prologue.IN_NAME
)


@dataclass(frozen=True)
class AvgPool2dProblem(WindowedImages):
    """y[oh, ow] = the sum of x over the window of `kernel` pixels at (oh, ow) * stride - padding, divided.

    What the padding adds is zero. The divisor is the number of pixels of the window in the image with its padding, or
    in the image alone without `count_padding`, or `divisor` unless that is 0.

    With a `prologue`, x is what that makes of its pixels, rounded to the dtype: an expression in `x`, in `gain` and
    `shift`, fp32 vectors of a number a channel, and in `gate`, [N][C] in the dtype.
    """

    count_padding: bool = True
    divisor: int = 0
    prologue: str = ""

    def __post_init__(self) -> None:
        check_windows("avg_pool2d", self)
        prologue.settle(self)
        if not 0 <= self.divisor < 2**31:
            raise UnsupportedError(
                f"divisor of {self.divisor}: avg_pool2d takes 1 to 2^31 - 1, or 0 for none"
            )

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> AvgPool2dProblem:
        """The problem of a name such as `192_35_k3s1p1_b32`."""
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "pooling; the form is 192_35_k3s1p1_b32: channels, image size (35 or 35x17), k kernel s stride, optional "
            "p padding, _b batch, _ceil, _inside where padding does not count, _by3 for a divisor of 3, "
            f"{prologue.FORM}, and _xpitch64 where pixels lie apart",
        )
        return AvgPool2dProblem(
            **read_windows(found) | apart, ceil_mode=bool(found["ceil"]), dtype=dtype, layout=layout,
            count_padding=not found["inside"], divisor=int(found["divisor"] or 0),
            prologue=found["prologue"] or "",
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        rules = (
            ("_ceil", self.ceil_mode),
            ("_inside", not self.count_padding),
            (f"_by{self.divisor}", self.divisor),
        )
        ending = "".join(text for text, holds in rules if holds)
        return f"{self.windows_name}_b{self.batch}{ending}{prologue.spell(self)}{spell_pitches(self)}"

    @property
    def bytes(self) -> int:
        return super().bytes + prologue.operand_bytes(self)

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + math.prod(self.kernel) / 6)
