"""What a model computes twice from the same values is computed once."""

from __future__ import annotations

from typing import Any

from escalade.engine.graph.graph import Graph, map_leaves
from escalade.engine.nodes import operator_of


def merge_repetitions(graph: Graph) -> None:
    """Nodes that do the same with the same are one, such as the activation of an embedding that every block applies for
    itself. What is drawn at random is another each time, and results stay tensors of their own."""
    first: dict[Any, str] = {}
    for node in graph:
        if node.name in graph.outputs or operator_of(node).is_random(node):
            continue
        inputs = tuple(sorted(node.inputs.items()))
        key = operator_of(node).name, inputs, _key(node.attributes), node.shape, node.dtype
        found = first.setdefault(key, node.name)
        if found != node.name:
            graph.remove(node, instead=found)


def _key(attributes: Any) -> str:
    """Attributes as a text: 1, 1.0 and True are not the same."""
    return repr(map_leaves(lambda leaf: leaf, attributes))
