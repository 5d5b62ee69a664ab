"""Common subexpression elimination."""

from __future__ import annotations

from typing import Any

from escalade.engine.graph.graph import Graph, map_leaves
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import is_random


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Merge nodes with the same operator, inputs and attributes, e.g. an activation that every block repeats.

    Random operators are never merged, nor are outputs, which stay separate tensors.
    """
    first: dict[Any, str] = {}
    for node in graph:
        if node.name in graph.outputs or is_random(node):
            continue
        inputs = tuple(sorted(node.inputs.items()))
        key = operator_of(node).name, inputs, _key(node.attributes), node.shape, node.dtype
        original = first.setdefault(key, node.name)
        if original != node.name:
            graph.remove(node, instead=original)


def _key(attributes: Any) -> str:
    """Return attributes as text, which tells 1, 1.0 and True apart."""
    return repr(map_leaves(lambda leaf: leaf, attributes))
