"""Quantisation to FP8 as a problem."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.shared.pointwise import check

_NAME = re.compile(r"quantise_(?P<elements>\d+)")


@dataclass(frozen=True)
class QuantiseProblem:
    """y = e4m3(x * factor) over `elements` elements: to nearest, within ±448. A NaN stays a NaN."""

    elements: int
    dtype: str = "fp32"
    """The dtype of x."""
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        check("quantise", self.elements, self.batch, self.dtype, self.layout)

    @staticmethod
    def parse(name: str) -> QuantiseProblem:
        found = _NAME.fullmatch(name)
        if not found:
            raise UnsupportedError(f"{name!r} names no quantisation; the form is quantise_802816")
        return QuantiseProblem(int(found["elements"]))

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        return f"quantise_{self.elements}"

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def bytes(self) -> int:
        return self.elements * (ELEMENT_BYTES[self.dtype] + 1) + 4

    @property
    def rounding(self) -> float:
        return 2.0**-24
