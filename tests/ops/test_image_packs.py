"""Packs of adjacent elements: divisions by multiplication, and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from escalade.ops.pad2d import PAD2D, Pad2dProblem
from escalade.ops.shared.image_packs import reciprocal

WORDS = st.integers(0, 2**32 - 1)


@given(size=st.integers(1, 2**32 - 1) | st.integers(1, 2**12), quotient=WORDS, number=WORDS)
@example(size=1, quotient=2**32 - 1, number=2**32 - 1)
@example(size=7, quotient=(2**32 - 1) // 7, number=2**32 - 1)
def test_reciprocals_divide_every_number_of_32_bits(size: int, quotient: int, number: int) -> None:
    multiplier, increment, shift = reciprocal(size)
    assert 0 <= multiplier < 2**32 and increment in (0, multiplier) and shift < 32
    for n in (number, quotient * size, quotient * size - 1, 2**32 - 1):
        if 0 <= n < 2**32:
            assert ((n * multiplier + increment) >> 32) >> shift == n // size


@pytest.mark.parametrize(("width", "counted"), [(64, "packs"), (62, "elements")])
def test_packs_of_whole_rows_are_counted_and_elements_of_others(width: int, counted: str) -> None:
    rung = PAD2D.ladder.rung("runs")
    few = Pad2dProblem(2**20 if counted == "packs" else 2**18, 16, 8, width - 4, (0, 0, 2, 2))
    many = replace(few, batch=2**24)
    (program,) = rung.recipe(few, rung.configs(few)[0]).programs
    assert dict(program.constants)["STRADDLES"] == (counted == "elements")
    assert rung.supports(few) is None
    assert f"runs counts {counted} in 32 bits" in str(rung.supports(many))
