"""Epilogue fusion: additions and pointwise expressions computed by the layer that produces their operand."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import RELU, activation_of, with_activation
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.rearrange import Pad2d, PixelShuffle, Shuffle
from escalade.engine.nodes.side_outputs import side_outputs_of
from escalade.engine.nodes.upsample2d import Upsample2d
from escalade.engine.nodes.views import Concatenate, Permute, Reshape
from escalade.engine.passes.carried_ranges import with_carried_range
from escalade.engine.passes.gradient_patterns import sort_nodes
from escalade.ops.expressions import Expression

_BIAS = Expression.parse("x + a")
_ATEN_MOVES = frozenset("expand broadcast_to repeat tile repeat_interleave roll flip".split())
"""PyTorch operators that move or repeat all elements of a tensor."""
MAX_CALLS = 64  # functions in one epilogue or prologue; more would not fit a kernel's registers


def takes_epilogue(node: Node, expression: Expression) -> bool:
    """Return True if kernels can apply an expression of `x`, the node's own result, before storing it.

    A node with a free residual can also apply an expression of `x` and `residual`, instead of adding the residual.
    """
    if Add.matches(node):
        return expression == RELU  # a flag of its kernels
    operator = operator_of(node)
    known = {"x", "residual"} if operator.takes_residual(node) else {"x"}
    is_known = known >= set(expression.inputs) and len(expression.calls) <= MAX_CALLS
    return operator.takes_expressions and is_known


def fuse_residuals(graph: Graph) -> None:
    """Fuse conv(x) + y into the convolution, which then runs in place of the addition.

    If both terms are convolutions, the one with more weights is fused: the other may be a shortcut, which can be fused
    further.
    """
    for node in graph:
        if not Add.matches(node):
            continue
        sides = [(node.inputs["x"], node.inputs["residual"]), (node.inputs["residual"], node.inputs["x"])]
        layers = [
            (graph.nodes[side], rest)
            for side, rest in sides
            if side != rest and rest not in graph.constants and _can_add(graph, side, node)
        ]
        if not layers:
            continue
        layer, rest = max(layers, key=lambda pair: _weight_elements(graph, pair[0]))
        fused = with_activation(layer.with_inputs(residual=rest), activation_of(node))
        graph.nodes[node.name] = replace(with_carried_range(fused, node, "residual"), name=node.name)
        del graph.nodes[layer.name]


def _can_add(graph: Graph, value: str, node: Node) -> bool:
    """Return True if the layer that produces `value` can compute the addition `node` and its activation."""
    layer = graph.nodes.get(value)
    if layer is None or not operator_of(layer).takes_residual(layer) or "residual" in layer.inputs:
        return False
    applied = activation_of(node)
    if graph.typed and len({graph.dtype_of(name) for name in (*node.inputs.values(), node.name)}) > 1:
        return False
    return (
        activation_of(layer).is_identity
        and graph.only_user(layer.name) is node
        and (applied.is_identity or takes_epilogue(layer, applied))
    )


def _weight_elements(graph: Graph, layer: Node) -> int:
    return math.prod(graph.shape_of(layer.inputs["weight"]))  # type: ignore[arg-type]


def fuse_biases(graph: Graph) -> None:
    """Add the bias of a product of rows in its layer, if the model multiplies and adds separately."""
    for node in graph:
        expression = operator_of(node).expression(node)
        if expression != _BIAS or graph.shape_of(node.inputs["a"]) != node.shape[-1:] or len(node.shape) < 2:
            continue
        reader, layer = node, graph.nodes.get(node.inputs["x"])
        while layer is not None and graph.only_user(layer.name) is reader and Reshape.matches(layer):
            reader, layer = layer, graph.nodes.get(layer.inputs["x"])
        if layer is None or not Conv2d.matches(layer) or graph.only_user(layer.name) is not reader:
            continue
        is_of_rows = layer.shape == (layer.shape[0], *node.shape[-1:], 1, 1)
        types = {layer.dtype, node.dtype, dtype_name(graph.dtype_of(node.inputs["a"]))}
        if not is_of_rows or "bias" in layer.inputs or len(types) > 1 or not activation_of(layer).is_identity:
            continue
        if node.name in graph.outputs or "residual" in layer.inputs or side_outputs_of(layer, graph):
            continue
        graph.nodes[layer.name] = layer.with_inputs(bias=node.inputs["a"])
        graph.remove(node, instead=node.inputs["x"])
    sort_nodes(graph)


def fuse_expressions(graph: Graph) -> None:
    """Fuse chains of unary pointwise functions, such as silu(conv(x)), into the layer.

    Functions commute with what only moves or repeats elements: silu(pixel_shuffle(conv(x))) is fused too.
    """
    for node in graph:
        expression = operator_of(node).expression(node)
        if expression is None or len(node.inputs) != 1 or node.shape != graph.shape_of(node.inputs["x"]):
            continue
        applied = _applied_earlier(graph, node, expression)
        if applied is not None:
            graph.nodes.update({one.name: one for one in applied})
            graph.remove(node, instead=node.inputs["x"])


def _applied_earlier(graph: Graph, reader: Node, expression: Expression) -> list[Node] | None:
    """Return new versions of the nodes before `reader`, whose layers apply an expression to all that it reads.

    None if a layer cannot, or if anything else reads one of the values.
    """
    applied = []
    for name in reader.inputs.values():
        producer = graph.nodes.get(name)
        if producer is None or producer.dtype != reader.dtype or graph.only_user(name) is not reader:
            return None
        whole = expression.substitute({"x": activation_of(producer)})
        if takes_epilogue(producer, whole):
            applied.append(with_activation(producer, whole))
            continue
        moved = _moving(producer, expression, graph)
        earlier = None if moved is None else _applied_earlier(graph, producer, expression)
        if moved is None or earlier is None:
            return None
        applied += [moved, *earlier]
    return applied


def _moving(node: Node, expression: Expression, graph: Graph) -> Node | None:
    """Return the node that moves f(x) as `node` moves x; None if it computes anything, or drops elements of x."""
    if any(kind.matches(node) for kind in (Reshape, Permute, PixelShuffle, Concatenate)):
        return node
    if node.calls:
        return node if node.calls in _ATEN_MOVES else None
    a = node.attributes
    if Pad2d.matches(node) and min(a["pads"]) >= 0:
        if a["mode"] != "constant":
            return node
        # f(pad(x, v)) = pad(f(x), f(v)); names of problems hold finite numbers only.
        value = expression.evaluate({"x": torch.tensor(a["value"], device="cpu")})[0].item()
        return node.with_attributes(value=value) if math.isfinite(value) else None
    is_repetition = Upsample2d.matches(node) and a["mode"] in ("nearest", "nearest_exact")
    if not is_repetition and not Shuffle.matches(node):
        return None
    sizes = zip(node.shape[1:], graph.shape_of(node.inputs["x"])[1:], strict=True)
    return node if all(size >= before for size, before in sizes) else None  # type: ignore[operator]


def fuse_operands(graph: Graph) -> None:
    """Fuse binary pointwise functions, such as silu(conv(x)) + y, into the layer, which then runs in their place."""
    for node in graph:
        expression = operator_of(node).expression(node)
        if expression is None or len(expression.inputs) != 2 or len(node.inputs) != 2:
            continue
        for role, other in (expression.inputs, expression.inputs[::-1]):
            layer, rest = graph.nodes.get(node.inputs[role]), node.inputs[other]
            if layer is None or not _can_read(graph, layer, rest, node):
                continue
            named = expression.rename({role: "x", other: "residual"})
            whole = named.substitute({"x": activation_of(layer)})
            if takes_epilogue(layer, whole):
                fused = with_activation(layer.with_inputs(residual=rest), whole)
                graph.nodes[node.name] = replace(with_carried_range(fused, node, "residual"), name=node.name)
                del graph.nodes[layer.name]
                break


def _can_read(graph: Graph, layer: Node, rest: str, node: Node) -> bool:
    """Return True if a layer can read `rest` as its residual, and `node` is the only reader of the layer."""
    has_free_residual = operator_of(layer).takes_residual(layer) and "residual" not in layer.inputs
    if (
        not has_free_residual
        or rest == layer.name
        or rest in graph.constants
        or graph.only_user(layer.name) is not node
    ):
        return False
    types = {layer.dtype, node.dtype, dtype_name(graph.dtype_of(rest))}
    return len(types) == 1 and layer.shape == node.shape == graph.shape_of(rest)
