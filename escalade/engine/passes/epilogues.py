"""Additions and activations done on the way out of the operation in front of them."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import NO_ACTIVATION


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
        activation = operator_of(node).applied_activation(node)
        fused = operator_of(layer).with_activation(layer.with_inputs(residual=rest), activation)
        graph.nodes[node.name] = replace(fused, name=node.name)
        del graph.nodes[layer.name]


def _can_add(graph: Graph, value: str, node: Node) -> bool:
    """Whether a value comes from a layer that can take the addition `node`, and whatever that applies."""
    layer = graph.nodes.get(value)
    if layer is None or not operator_of(layer).takes_residual or "residual" in layer.inputs:
        return False
    activation = operator_of(node).applied_activation(node)
    return _is_open(graph, layer, node) and (
        activation == NO_ACTIVATION or activation in operator_of(layer).takes_activations
    )


def _is_open(graph: Graph, layer: Node, reader: Node) -> bool:
    """Whether a layer applies no activation yet, and only this node reads it."""
    is_plain = operator_of(layer).applied_activation(layer) == NO_ACTIVATION
    return is_plain and graph.only_user(layer.name) is reader


def _weights(graph: Graph, layer: Node) -> int:
    return graph.constants[layer.inputs["weight"]].numel()


def fuse_activations(graph: Graph) -> None:
    """relu(conv(x)) becomes the convolution's own last step, if that takes the activation."""
    for node in graph:
        activation = operator_of(node).activation(node)
        layer = graph.nodes.get(node.inputs["x"]) if activation is not None else None
        if activation is None or layer is None:
            continue
        operator = operator_of(layer)
        if activation in operator.takes_activations and _is_open(graph, layer, node):
            graph.nodes[layer.name] = operator.with_activation(layer, activation)
            graph.remove(node, instead=layer.name)
