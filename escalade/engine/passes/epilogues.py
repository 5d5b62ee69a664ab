"""Epilogue fusion: additions and pointwise expressions computed by the layer that produces their operand."""

from __future__ import annotations

import math
from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import RELU, activation_of, with_activation
from escalade.engine.nodes.elementwise import Add
from escalade.ops.expressions import Expression

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
        graph.nodes[node.name] = replace(fused, name=node.name)
        del graph.nodes[layer.name]


def _can_add(graph: Graph, value: str, node: Node) -> bool:
    """Return True if `value` is produced by a layer that can compute the addition `node` and what that applies."""
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


def fuse_expressions(graph: Graph) -> None:
    """Fuse chains of unary pointwise functions, such as silu(conv(x)), into the layer."""
    for node in graph:
        expression = operator_of(node).expression(node)
        layer = graph.nodes.get(node.inputs["x"]) if expression is not None else None
        if expression is None or layer is None or not _is_unary(node, layer):
            continue
        whole = expression.substitute({"x": activation_of(layer)})
        if takes_epilogue(layer, whole) and graph.only_user(layer.name) is node:
            graph.nodes[layer.name] = with_activation(layer, whole)
            graph.remove(node, instead=layer.name)


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
                graph.nodes[node.name] = replace(fused, name=node.name)
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


def _is_unary(node: Node, layer: Node) -> bool:
    """Return True if a pointwise node reads only the layer, without changing shape or dtype."""
    return len(node.inputs) == 1 and node.shape == layer.shape and node.dtype == layer.dtype
