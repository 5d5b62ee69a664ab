"""The change of layout and element type as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.pitch import check_pitches
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_problem,
    require_32_bits,
)

SOURCES = ("uint8", *DTYPES)


@dataclass(frozen=True)
class ConvertProblem(Images, Named):
    """y[n, c] = x[n, c], or x[n, c] * scale[c] + shift[c], in another layout and element type.

    `source` and `source_layout` are x's, `dtype` and `layout` y's. x stores `stored_channels`, of which the
    first `channels` are taken; y has `padded_channels`, zeros from `channels` on. Both are `channels` unless
    given. scale and shift are fp32. A part of an x in NHWC begins at its own address, and the whole's channels are
    stored. With `ways` above 1 channels are dealt out in turns: y's channel c is x's c / ways + c % ways * step.
    """

    NAME: ClassVar = NamePattern(
        "conversion",
        "{channels}[of{stored_channels}][to{padded_channels}]_{height,width}_{source:uint8|fp32|fp16|bf16}"
        "_{source_layout:nchw|nhwc}_b{batch}{normalise?_norm}[_dealt{ways}x{step}]",
        dict.fromkeys(("stored_channels", "padded_channels"), lambda p: p.channels),
    )

    source: str = "fp32"
    source_layout: str = "nchw"
    dtype: str = "fp32"
    layout: str = "nhwc"
    padded_channels: int = 0
    normalise: bool = False
    stored_channels: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel of a y in NHWC that is a part of a larger buffer; 0: it is dense."""
    ways: int = 1
    step: int = 0
    """Channels of x from one way to the next."""

    def __post_init__(self) -> None:
        for field in ("padded_channels", "stored_channels"):
            if getattr(self, field) == 0:
                object.__setattr__(self, field, self.channels)
        _check(self)

    @property
    def output_elements(self) -> int:
        return self.batch * self.padded_channels * self.pixels

    @property
    def flops(self) -> int:
        return 2 * self.elements if self.normalise else 0

    @property
    def bytes(self) -> int:
        read = self.elements * ELEMENT_BYTES[self.source]
        written = self.output_elements * ELEMENT_BYTES[self.dtype]
        return read + written + (8 * self.channels if self.normalise else 0)

    @property
    def rounding(self) -> float:
        """The product and the sum are rounded to fp32; without them the only rounding is the target's own."""
        return 2.0**-24 if self.normalise else 0.0


def reach(channels: int, ways: int, step: int) -> int:
    """Channels up to the last that so many are dealt out of."""
    each, more = divmod(channels, ways)
    longer = (more - 1) * step + each + 1 if more else 0
    return max(longer, (ways - 1) * step + each if each else 0)


def _check(p: ConvertProblem) -> None:
    require("convert", "source", p.source, SOURCES)
    require("convert", "source layout", p.source_layout, LAYOUTS)
    check_problem("convert", p)
    require_at_least(1, {"ways": p.ways})
    require_at_least(0, {"step": p.step})
    if p.ways == 1 and p.step:
        raise UnsupportedError(f"a step of {p.step} between channels of one way: it takes at least 2 ways")
    require_at_least(p.channels, {"padded channels": p.padded_channels})
    require_at_least(reach(p.channels, p.ways, p.step), {"stored channels": p.stored_channels})
    check_pitches(p, y=p.padded_channels)
    require_32_bits("convert", max(p.stored_channels, p.padded_channels, p.y_pitch) * p.pixels)
