"""Makes a graph of one of AOTAutograd's, forward or backward, for inputs of one kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from escalade.engine.capture.functional import FunctionalReader
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph


@dataclass(frozen=True)
class Given:
    """A result that is what the part was given at this place."""

    place: int


@dataclass(frozen=True)
class Made:
    """A result that is the graph's output of this number."""

    number: int


@dataclass(frozen=True)
class Part:
    """A graph for inputs of one kind, and how its outputs are returned."""

    graph: Graph
    results: tuple[Given | Made | int | float | bool | None, ...]
    layouts: dict[str, str]
    """The layouts that outputs which are images have in PyTorch."""


class _Measured(torch.fx.Interpreter):
    """Runs a module on tensors without contents, and notes what each node gives: sizes that were symbols are numbers
    then."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def capture_part(module: torch.fx.GraphModule, given: Sequence[Any]) -> Part:
    """What a module of AOTAutograd's does with tensors and numbers like these."""
    own = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hollow = [
        mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
        for value in given
    ]
    with torch.no_grad(), mode:
        _Measured(own).run(*hollow)
    reader = FunctionalReader(own, "this part of the model")
    places = {node: place for place, node in enumerate(own.graph.find_nodes(op="placeholder"))}
    graph = reader.read([f"input_{place}" for place in places.values()], [""] * len(places))
    made: dict[torch.fx.Node, int] = {}
    results: list[Given | Made | int | float | bool | None] = []
    for result in reader.results:
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else result
        if value is None or isinstance(value, int | float):
            results.append(value)
        elif not isinstance(value, torch.Tensor):
            raise CaptureError(f"a part of the model gives {type(value).__name__}; a plan gives tensors")
        elif result in places:
            results.append(Given(places[result]))
        else:
            results.append(Made(made.setdefault(result, len(made))))
    reader.returning(graph, list(made))
    layouts = {
        output: InputFormat.of(node.meta["val"]).layout
        for output, node in zip(graph.outputs, made, strict=True)
        if node.meta["val"].dim() == 4
    }
    return Part(graph, tuple(results), layouts)
