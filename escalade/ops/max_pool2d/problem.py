"""The maximum over windows as a problem."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name
from escalade.ops.base.pitch import read_pitches, spell_pitches
from escalade.ops.shared.images import pair_pattern, read_pair, spell_pair
from escalade.ops.shared.windowed import WINDOWS_NAME, WindowedImages, check_windows, read_windows

_NAME = re.compile(
    rf"{WINDOWS_NAME}(d{pair_pattern('dilation')})?_b(?P<batch>\d+)(?P<ceil>_ceil)?(_(?P<places>places|behindrelu))?"
)
NOWHERE = 255
"""What is stored in place of a maximum that a ReLU in front of the pool has cut off."""


@dataclass(frozen=True)
class MaxPool2dProblem(WindowedImages):
    """y[oh, ow] = max of x over the window of `kernel` pixels at (oh, ow) * stride - padding.

    What the padding adds is less than every number. The pixels of a window are `dilation` apart. With `places` the
    result has a second part, buffer `places`, which the gradient is found by: for each output the place of its maximum
    in the window, row by row, in one byte; the first of equals, the last of NaNs. With `behind_relu`, where x came out
    of a ReLU, it is 255 for maxima that are not positive, through which no gradient goes.
    """

    dilation: tuple[int, int] = (1, 1)
    places: bool = False
    behind_relu: bool = False

    def __post_init__(self) -> None:
        check_windows("max_pool2d", self)
        if self.behind_relu and not self.places:
            raise UnsupportedError(
                f"{self.name}: behind a ReLU only the places differ, which are not asked for"
            )
        if self.places:
            require_bytes_for_places(self.kernel)

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> MaxPool2dProblem:
        """The problem of a name such as `64_112_k3s2p1_b256`."""
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "pooling; the form is 64_112_k3s2p1_b256: channels, image size (112 or 112x96), "
            "k kernel s stride, optional p padding and d dilation, _b batch, _ceil, _places for places of maxima, "
            "_behindrelu for those behind a ReLU, and _xpitch64 where pixels lie apart",
        )
        dilation = read_pair(found, "dilation") if found["dilation"] else (1, 1)
        return MaxPool2dProblem(
            **read_windows(found) | apart, ceil_mode=bool(found["ceil"]), dtype=dtype, layout=layout, dilation=dilation,
            places=bool(found["places"]), behind_relu=found["places"] == "behindrelu",
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        dilation = f"d{spell_pair(self.dilation)}" if self.dilation != (1, 1) else ""
        ceil = "_ceil" if self.ceil_mode else ""
        places = "_behindrelu" if self.behind_relu else "_places" if self.places else ""
        return f"{self.windows_name}{dilation}_b{self.batch}{ceil}{places}{spell_pitches(self)}"

    @property
    def dilations(self) -> tuple[int, int]:
        return self.dilation

    @property
    def bytes(self) -> int:
        return super().bytes + (self.output_elements if self.places else 0)

    @property
    def rounding(self) -> float:
        """Nothing is computed: a maximum is one of the inputs."""
        return 0.0


def require_bytes_for_places(kernel: tuple[int, int]) -> None:
    """Refuses windows with more pixels than one byte tells apart."""
    if kernel[0] * kernel[1] > NOWHERE:
        raise UnsupportedError(
            f"a kernel of {spell_pair(kernel)}: a place is stored in a byte, which takes windows of up to {NOWHERE} "
            "pixels"
        )
