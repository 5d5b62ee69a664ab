"""Quantisation to FP8 as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.shared.pointwise import check


@dataclass(frozen=True)
class QuantiseProblem(Named):
    """y = e4m3(x * factor) over `elements` elements: to nearest, within ±448. A NaN stays a NaN."""

    NAME: ClassVar = NamePattern(
        "quantization",
        "quantise_{elements}",
    )

    elements: int
    dtype: str = "fp32"
    """The dtype of x."""
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        check("quantise", self.elements, self.batch, self.dtype, self.layout)

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def bytes(self) -> int:
        return self.elements * (ELEMENT_BYTES[self.dtype] + 1) + 4

    @property
    def rounding(self) -> float:
        return 2.0**-24
