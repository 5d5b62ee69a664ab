"""A model captured for whatever sizes its inputs have: once with symbols for them, and again where it does something
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from escalade.engine.capture.conditions import Conditions
from escalade.engine.capture.export import (
    Exported,
    Given,
    export_free,
    graph_of,
    read_batched,
    require_module,
    with_original,
)
from escalade.engine.capture.separate import Original
from escalade.engine.graph.graph import Graph
from escalade.errors import UnsupportedError

_MOST_PROGRAMS = 8
"""Programs with symbols that are kept: a model that branches by size has one for each branch."""


class AnySize:
    """A model as it was when this was made.

    It is captured for the example's size first, as most models meet no other. The second size has it captured with
    symbols, and for further sizes these become numbers, for which nothing of the model runs. Where it decides by a size
    what to do, or has symbols in a way that a graph cannot hold, it is captured for that size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        *,
        ours: Sequence[torch.Tensor] = (),
        autocast: bool = False,
    ) -> None:
        """It takes what `capture` takes; `graph` is what that gives."""
        require_module(model)
        given = Given.of(arguments, keywords)
        self._autocast = autocast

        def work(original: Original) -> Graph:
            self._kept = original.kept()
            return graph_of(original, given)

        self.graph = with_original(model, ours, autocast, work)
        self._examples = Given(*given.map(_Like.of))
        self._programs: list[_Program] = []

    def graph_for(self, shapes: Sequence[Sequence[int]]) -> Graph:
        """What the model does with tensors of these sizes, and any batch if it allows that; the example's otherwise."""
        left = iter(shapes)
        given = Given(
            *self._examples.map(lambda leaf: leaf.made(next(left)) if isinstance(leaf, _Like) else leaf)
        )

        def work(original: Original) -> Graph:
            for program in self._programs:
                if (graph := program.graph(original, given)) is not None:
                    return graph
            exported = export_free(original, given, lambda dimension: True)
            if exported is not None:
                program = _Program(exported)
                if (graph := program.graph(original, given)) is not None:
                    self._programs = [program, *self._programs][:_MOST_PROGRAMS]
                    return graph
            return graph_of(original, given)

        return with_original(self._kept.model, self._kept.tensors, self._autocast, work)


@dataclass(frozen=True)
class _Like:
    """What a tensor is besides its sizes and its contents."""

    dtype: torch.dtype
    device: torch.device
    is_channels_last: bool

    @staticmethod
    def of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        last = leaf.dim() == 4 and not leaf.is_contiguous()
        return _Like(leaf.dtype, leaf.device, last and leaf.is_contiguous(memory_format=torch.channels_last))

    def made(self, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)
        return tensor.contiguous(memory_format=torch.channels_last) if self.is_channels_last else tensor


class _Program:
    """The model with symbols for all sizes, and what must hold of them."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        program = exported.program
        self._conditions = Conditions(program)
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        names = program.graph_signature.user_inputs
        values = [placeholders[name].meta["val"] for name in names if name in placeholders]
        self._shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]

    def graph(self, original: Original, given: Given) -> Graph | None:
        """The graph for these inputs and any batch; None if the model does something else with them."""
        batches: set[sympy.Symbol] = set()
        sizes: dict[sympy.Symbol, int] = {}
        for shape, tensor in zip(self._shapes, given.tensors, strict=True):
            if len(shape) != tensor.dim():
                return None
            for dimension, (size, number) in enumerate(zip(shape, tensor.shape, strict=True)):
                symbol = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
                is_batch = symbol.is_Symbol and dimension == 0
                if is_batch:
                    batches.add(symbol)
                actual = given.batch if is_batch else number
                if (sizes.setdefault(symbol, actual) if symbol.is_Symbol else symbol) != actual:
                    return None
        if len(batches) != 1 or not self._conditions.hold_for(sizes):
            return None
        numbers = {symbol: size for symbol, size in sizes.items() if symbol not in batches}
        try:
            return read_batched(self._exported, original, given, numbers)
        except UnsupportedError:  # by symbols it is no graph of tensors; by numbers it may be
            return None
