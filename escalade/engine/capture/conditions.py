"""What an exported program takes for granted of the sizes that are symbols in it: the branches that the model took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

Sizes = Mapping[sympy.Symbol, int]
_LEAST = 2
"""The size that export has symbols begin with, whatever the model is like."""


class Conditions:
    """The ranges of a program's symbols, and the claims about them that were true for the example."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self._ranges: dict[Any, Any] = {}
        self._claims: list[Any] = []
        modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in exported.graph.nodes)
        for environment in {
            mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None
        }:
            self._ranges |= environment.var_to_range
            self._claims += [environment.replace(guard.expr) for guard in environment.guards]
        self._ranges |= exported.range_constraints

    def hold_for(self, sizes: Sizes) -> bool:
        """Whether the model does just this where every symbol is a number."""
        in_range = all(size in self._range(symbol) for symbol, size in sizes.items())
        return in_range and all(claim == sympy.true for claim in self._with(sizes))

    def batches(self, symbol: sympy.Symbol, example: int, sizes: Sizes) -> tuple[int, int | None]:
        """The least and the largest batch, None for any, between which the model does just what it does for the
        example's, where the other symbols are numbers."""
        known = self._range(symbol)
        claims = [claim for claim in self._with(sizes) if claim != sympy.true]
        spans = [(known.lower, known.upper), (example, known.upper), (known.lower, example)]
        least, most = next((span for span in spans if _are_true(claims, symbol, span)), (example, example))
        if least == _LEAST and _are_true(claims, symbol, (1, 1)):
            least = 1
        return int(least), None if most == int_oo else int(most)

    def _range(self, symbol: sympy.Symbol) -> Any:
        return self._ranges.get(symbol, ValueRanges(_LEAST, int_oo))

    def _with(self, sizes: Sizes) -> list[Any]:
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        return [claim.xreplace(numbers) for claim in self._claims]


def _are_true(claims: list[Any], symbol: sympy.Symbol, span: tuple[Any, Any]) -> bool:
    """Whether all claims hold for every number of a span; what cannot be told does not."""
    return all(bound_sympy(claim, {symbol: ValueRanges(*span)}).lower == sympy.true for claim in claims)
