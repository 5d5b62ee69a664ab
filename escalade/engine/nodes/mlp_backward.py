"""The gradients of a chain of small linear layers, which one kernel computes together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.gradients import cast_of
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.mlp import parameters_of
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.slice import Slice
from escalade.ops.base.dtypes import NAMES
from escalade.ops.mlp.problem import parse_layers
from escalade.ops.mlp_backward import MLP_BACKWARD, MlpBackwardProblem
from escalade.ops.mlp_backward.reference import compute as compute_gradients

_GRADIENT = "grad_y"


class MlpBackward(Operator):
    """The gradients of all parameters of `mlp` and, if asked for, of its input, concatenated in fp32."""

    name = "mlp_backward"
    values = ("x", _GRADIENT)
    mixes_types = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"escalade::mlp_backward": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, gradient = call.value("x"), call.value(_GRADIENT)
        if not graph.typed or x is None or gradient is None or call("rung") is not None:
            return None
        layers = parse_layers(call("layers"))
        names = MlpBackwardProblem(1, layers).sizes
        inputs = {"x": x, _GRADIENT: gradient, **dict(zip(names, parameters_of(node), strict=True))}
        return self.instead_of(
            node, inputs, layers=layers, input_gradient=bool(call("input_gradient", False))
        )

    def fuse_step(self, graph: Graph) -> None:
        """Keep gradients in fp32 that autograd rounds to the type of autocast and widens again."""
        for node in graph:
            if not self.matches(node):
                continue
            for cast in graph.readers(node.name):
                if cast_of(cast, graph) is not None:
                    _read_unrounded(graph, node, cast)
        graph.remove_dead_code()

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        features = node.attributes["layers"][0].width_in
        rows = {role: inputs[role].reshape(-1, inputs[role].shape[-1]) for role in self.values}
        problem = self._problem(node, rows["x"].numel() // features, NAMES[rows["x"].dtype])
        return compute_gradients(problem, {**inputs, **rows})

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """The kernels take one type for all that they read; their result is fp32."""
        types = {forms.value(name).dtype for name in node.inputs.values()}
        if len(types) > 1:
            return None
        rows = math.prod(forms.value(node.inputs["x"]).shape) // node.attributes["layers"][0].width_in
        return Lowered(MLP_BACKWARD, self._problem(node, rows, NAMES[types.pop()]))

    def _problem(self, node: Node, rows: int, dtype: str) -> MlpBackwardProblem:
        a = node.attributes
        return MlpBackwardProblem(rows, a["layers"], a["input_gradient"], dtype)


def _read_unrounded(graph: Graph, node: Node, cast: Node) -> None:
    """Let slices of a rounded result read the result itself, if all that they are used for is fp32."""
    slices = graph.readers(cast.name)
    if cast.name in graph.outputs or not all(Slice.matches(one) for one in slices):
        return
    for one in slices:
        views, readers = _seen_as(graph, one)
        if not all(Pointwise.matches(reader) and reader.dtype == node.dtype for reader in readers):
            continue
        for view in views:
            graph.nodes[view.name] = replace(view, dtype=node.dtype)
        graph.nodes[one.name] = graph.nodes[one.name].with_inputs(x=node.name)
        names = {view.name for view in views}
        graph.output_types = tuple(
            node.dtype if name in names else kind
            for name, kind in zip(graph.outputs, graph.output_types, strict=True)
        )
        for reader in readers:
            source = cast_of(reader, graph)
            if source in names and reader.name not in graph.outputs:
                graph.remove(reader, instead=source)


def _seen_as(graph: Graph, value: Node) -> tuple[list[Node], list[Node]]:
    """Return a node with all reshapes of its result, and the other nodes that read any of them."""
    views: list[Node] = [value]
    readers: list[Node] = []
    for view in views:
        for reader in graph.readers(view.name):
            (views if Reshape.matches(reader) else readers).append(reader)
    return views, readers
