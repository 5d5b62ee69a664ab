"""Guards of an exported program on its symbolic sizes, from the branches that the model took during export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

Sizes = Mapping[sympy.Symbol, int]
_EXPORT_MINIMUM = 2  # torch.export specializes sizes 0 and 1, so every symbol's range starts here


class ShapeGuards:
    """Ranges of a program's symbols, and the guards on them that held for the example."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self._ranges: dict[Any, Any] = {}
        self._guards: list[Any] = []
        modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in exported.graph.nodes)
        for env in {mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None}:
            self._ranges |= env.var_to_range
            self._guards += [env.replace(guard.expr) for guard in env.guards]
        self._ranges |= exported.range_constraints

    def hold_for(self, sizes: Sizes) -> bool:
        """Return True if the program is valid with these sizes for its symbols."""
        in_range = all(size in self._range(symbol) for symbol, size in sizes.items())
        return in_range and all(guard == sympy.true for guard in self._substituted(sizes))

    def batch_range(self, symbol: sympy.Symbol, example: int, sizes: Sizes) -> tuple[int, int | None]:
        """Return the smallest and the largest valid batch size (None: unbounded), given sizes for the other symbols."""
        known = self._range(symbol)
        guards = [guard for guard in self._substituted(sizes) if guard != sympy.true]
        spans = [(known.lower, known.upper), (example, known.upper), (known.lower, example)]
        least, most = next((span for span in spans if _hold_on(guards, symbol, span)), (example, example))
        if least == _EXPORT_MINIMUM and _hold_on(guards, symbol, (1, 1)):
            least = 1
        return int(least), None if most == int_oo else int(most)

    def _range(self, symbol: sympy.Symbol) -> Any:
        return self._ranges.get(symbol, ValueRanges(_EXPORT_MINIMUM, int_oo))

    def _substituted(self, sizes: Sizes) -> list[Any]:
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        return [guard.xreplace(numbers) for guard in self._guards]


def _hold_on(guards: list[Any], symbol: sympy.Symbol, span: tuple[Any, Any]) -> bool:
    """Return True if all guards provably hold on the whole span; undecidable guards count as false."""
    return all(bound_sympy(guard, {symbol: ValueRanges(*span)}).lower == sympy.true for guard in guards)
