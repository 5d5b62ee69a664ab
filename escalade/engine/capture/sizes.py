"""A model captured for whatever sizes its inputs have: followed for each, or exported with symbols for them, and again
where it does something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.strides import empty, layout_of
from escalade.engine.capture.example_inputs import Given, require_module
from escalade.engine.capture.export import graph_of, with_original
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.python_state import require_repeatable
from escalade.engine.capture.trace import traced
from escalade.engine.graph.graph import Graph

_MOST_PROGRAMS = 8
"""Programs with symbols that are kept: a model that branches by size has one for each branch."""
_MOST_FAILURES = 2
"""Sizes for which symbols are tried in vain: they take PyTorch far longer than numbers do."""


class AnySize:
    """A model as it was when this was made.

    It is captured for the example's size first, as most models meet no other, and for each further size where it can be
    followed. Otherwise the second size has it exported with symbols, and for further sizes these become numbers, for
    which nothing of the model runs. Where it decides by a size what to do, or has symbols in a way that a graph cannot
    hold, it is exported for that size.
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
        self._likes, self._structure = list(map(_Like.of, given.tensors)), given.structure
        self._programs: list[Any] = []
        self._failures = 0 if self.graph.is_batched else 1
        """Sizes for which the model could not be captured with symbols."""

    def graph_for(self, shapes: Sequence[Sequence[int]]) -> Graph:
        """What the model does with tensors of these sizes, and any batch if it allows that; the example's otherwise."""
        made = [like.made(shape) for like, shape in zip(self._likes, shapes, strict=True)]
        given = Given(made, self._structure)

        def work(original: Original) -> Graph:
            graph = captured(original)
            require_repeatable(original, given)
            return graph

        def captured(original: Original) -> Graph:
            if (graph := traced(original, given)) is not None:
                return graph
            from escalade.engine.capture.programs import Program, batched_graph, export_free, fixed_graph

            for program in self._programs:
                if (graph := program.graph(original, given)) is not None:
                    return graph
            if self._failures < _MOST_FAILURES:
                exported = export_free(original, given, lambda dimension: True)
                program = None if exported is None else Program(exported)
                if program is not None and (graph := program.graph(original, given)) is not None:
                    self._programs = [program, *self._programs][:_MOST_PROGRAMS]
                    return graph
                if (graph := batched_graph(original, given)) is not None:
                    return graph
                self._failures += 1
            return fixed_graph(original, given)

        return with_original(self._kept.model, self._kept.tensors, self._autocast, work)


@dataclass(frozen=True)
class _Like:
    """What a tensor is besides its sizes and its contents."""

    dtype: torch.dtype
    device: torch.device
    layout: str

    @staticmethod
    def of(leaf: torch.Tensor) -> _Like:
        return _Like(leaf.dtype, leaf.device, layout_of(leaf))

    def made(self, shape: Sequence[int]) -> torch.Tensor:
        return empty(shape, self.dtype, self.layout, self.device).zero_()
