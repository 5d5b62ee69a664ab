"""Capture of a forward or backward graph of AOTAutograd, for inputs of fixed shapes."""

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
class PassedThrough:
    """A result that is the input with this index."""

    index: int


@dataclass(frozen=True)
class GraphResult:
    """A result that is the graph's output with this index."""

    index: int


@dataclass(frozen=True)
class AotGraph:
    """A graph for inputs of fixed shapes, and the results that are built from its outputs."""

    graph: Graph
    results: tuple[PassedThrough | GraphResult | int | float | bool | None, ...]
    layouts: dict[str, str]
    """Layout in PyTorch of each 4-D output."""


class _ShapeInterpreter(torch.fx.Interpreter):
    """Re-runs a module on fake tensors so that node metadata has numbers for symbolic sizes."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def capture_aot_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> AotGraph:
    """Capture a module of AOTAutograd for inputs of the same shapes and the same numbers as these."""
    module_copy = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]
    with torch.no_grad(), mode:
        _ShapeInterpreter(module_copy).run(*fakes)
    reader = FunctionalReader(module_copy, "this part of the model")
    placeholders = {node: index for index, node in enumerate(module_copy.graph.find_nodes(op="placeholder"))}
    graph = reader.read([f"input_{index}" for index in placeholders.values()], [""] * len(placeholders))
    outputs: dict[torch.fx.Node, int] = {}
    results: list[PassedThrough | GraphResult | int | float | bool | None] = []
    for result in reader.results:
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else result
        if value is None or isinstance(value, int | float):
            results.append(value)
        elif not isinstance(value, torch.Tensor):
            raise CaptureError(f"a part of the model returns {type(value).__name__}; a plan returns tensors")
        elif result in placeholders:
            results.append(PassedThrough(placeholders[result]))
        else:
            results.append(GraphResult(outputs.setdefault(result, len(outputs))))
    reader.set_outputs(graph, list(outputs))
    layouts = {
        output: InputFormat.of(node.meta["val"]).layout
        for output, node in zip(graph.outputs, outputs, strict=True)
        if node.meta["val"].dim() == 4
    }
    return AotGraph(graph, tuple(results), layouts)
