"""Additions and pointwise expressions done on the way out of the operation in front of them."""

from __future__ import annotations

import math
from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of


def fuse_residuals(graph: Graph) -> None:
    """conv(x) + y becomes the convolution's own last step; it then runs where the addition did.

    If both terms come from convolutions the one with more weights takes the other, which may turn out to be a
    shortcut.
    """
    for node in graph:
        if not operator_of(node).is_addition:
            continue
        sides = [(node.inputs["x"], node.inputs["residual"]), (node.inputs["residual"], node.inputs["x"])]
        layers = [
            (graph.nodes[side], rest)
            for side, rest in sides
            if side != rest and rest not in graph.constants and _can_add(graph, side, node)
        ]
        if not layers:
            continue
        layer, rest = max(layers, key=lambda pair: _weights(graph, pair[0]))
        applied = operator_of(node).applied(node)
        fused = operator_of(layer).applying(layer.with_inputs(residual=rest), applied)
        graph.nodes[node.name] = replace(fused, name=node.name)
        del graph.nodes[layer.name]


def _can_add(graph: Graph, value: str, node: Node) -> bool:
    """Whether a value comes from a layer that can take the addition `node`, and whatever that applies."""
    layer = graph.nodes.get(value)
    if layer is None or not operator_of(layer).takes_residual(layer) or "residual" in layer.inputs:
        return False
    applied = operator_of(node).applied(node)
    if graph.typed and len({graph.dtype_of(name) for name in (*node.inputs.values(), node.name)}) > 1:
        return False
    return (
        operator_of(layer).applied(layer).is_identity
        and graph.only_user(layer.name) is node
        and (applied.is_identity or operator_of(layer).takes(layer, applied))
    )


def _weights(graph: Graph, layer: Node) -> int:
    return math.prod(graph.shape_of(layer.inputs["weight"]))  # type: ignore[arg-type]


def fuse_expressions(graph: Graph) -> None:
    """silu(conv(x)) becomes the convolution's own last step; and so do all functions of its elements behind it."""
    for node in graph:
        expression = operator_of(node).expression(node)
        layer = graph.nodes.get(node.inputs["x"]) if expression is not None else None
        if expression is None or layer is None or not _is_of_one_value(node, layer):
            continue
        operator = operator_of(layer)
        whole = expression.substitute({"x": operator.applied(layer)})
        if operator.takes(layer, whole) and graph.only_user(layer.name) is node:
            graph.nodes[layer.name] = operator.applying(layer, whole)
            graph.remove(node, instead=layer.name)


def fuse_operands(graph: Graph) -> None:
    """silu(conv(x)) + y, or any other function of its elements and those of another value, becomes the convolution's
    own last step; it then runs where that function did."""
    for node in graph:
        expression = operator_of(node).expression(node)
        if expression is None or len(expression.inputs) != 2 or len(node.inputs) != 2:
            continue
        for role, other in (expression.inputs, expression.inputs[::-1]):
            layer, rest = graph.nodes.get(node.inputs[role]), node.inputs[other]
            if layer is None or not _can_take(graph, layer, rest, node):
                continue
            operator = operator_of(layer)
            named = expression.rename({role: "x", other: "residual"})
            whole = named.substitute({"x": operator.applied(layer)})
            if operator.takes(layer, whole):
                fused = operator.applying(layer.with_inputs(residual=rest), whole)
                graph.nodes[node.name] = replace(fused, name=node.name)
                del graph.nodes[layer.name]
                break


def _can_take(graph: Graph, layer: Node, rest: str, node: Node) -> bool:
    """Whether a layer can read another value, of the sizes of its result, for the only reader of that."""
    is_free = operator_of(layer).takes_residual(layer) and "residual" not in layer.inputs
    if (
        not is_free
        or rest == layer.name
        or rest in graph.constants
        or graph.only_user(layer.name) is not node
    ):
        return False
    types = {layer.dtype, node.dtype, str(graph.dtype_of(rest)).removeprefix("torch.")}
    return len(types) == 1 and layer.shape == node.shape == graph.shape_of(rest)


def _is_of_one_value(node: Node, layer: Node) -> bool:
    """Whether a pointwise node reads nothing else, and makes numbers of it."""
    return len(node.inputs) == 1 and node.shape == layer.shape and node.dtype == layer.dtype
