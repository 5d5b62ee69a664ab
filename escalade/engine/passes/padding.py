"""Folding of zero padding into the layers that read the padded image."""

from __future__ import annotations

from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of


def fold_padding(graph: Graph) -> None:
    """Replace conv(pad(x)) by a convolution with more padding, if every reader of the padded image can do so."""
    for node in graph:
        zeros = operator_of(node).zeros_around(node)
        if zeros is None or node.name in graph.outputs:
            continue
        users = [user for user in graph if node.name in user.inputs.values()]
        if any([role for role, name in user.inputs.items() if name == node.name] != ["x"] for user in users):
            continue
        padded = [operator_of(user).padded(user, zeros) for user in users]
        layers = [layer for layer in padded if layer is not None]
        if len(layers) == len(users):
            graph.nodes.update({layer.name: layer for layer in layers})
            graph.remove(node, instead=node.inputs["x"])
