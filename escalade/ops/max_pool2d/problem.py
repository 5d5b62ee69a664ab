"""The maximum over windows as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.naming import NamePattern, spell_pair
from escalade.ops.shared.windowed import WINDOWS, WindowedImages, check_windows

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

    NAME: ClassVar = NamePattern(
        "pooling",
        WINDOWS + "[d{dilation}]_b{batch}{ceil_mode?_ceil}[_{kept:places|behindrelu}]",
        {"kept": ""},
    )

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

    @property
    def kept(self) -> str:
        """What the name says of `places` and `behind_relu`."""
        return "behindrelu" if self.behind_relu else "places" if self.places else ""

    @classmethod
    def _fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        kept = values.pop("kept")
        return values | {"places": kept != "", "behind_relu": kept == "behindrelu"}

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
