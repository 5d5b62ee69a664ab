"""Sinking of permutations past other operators, until two of them cancel."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.permute import Permute


def sink_permutes(graph: Graph) -> None:
    """Replace f(permute(x)) by permute(g(x)) where an operator has such a g.

    A block that permutes to channels-last for a norm and two linear layers, and back, then has no permutation left, and
    its linear layers become 1×1 convolutions, with their fusions.
    """
    for node in graph:
        if Permute.matches(node):
            _compose(graph, node)
        else:
            _sink(graph, node)
    graph.remove_dead_code()


def _compose(graph: Graph, node: Node) -> None:
    """Merge a permutation with a preceding one; remove both if they cancel."""
    before = graph.nodes.get(node.inputs["x"])
    if not Permute.matches(before):
        return
    first, second = before.attributes["order"], node.attributes["order"]
    order = tuple(first[dim] for dim in second)
    if order == tuple(range(len(order))):
        graph.remove(node, instead=before.inputs["x"])
    else:
        both = node.with_inputs(x=before.inputs["x"]).with_attributes(order=order)
        graph.nodes[node.name] = both


def _sink(graph: Graph, node: Node) -> None:
    values = {role: name for role, name in node.inputs.items() if name not in graph.constants}
    permutes = [graph.nodes.get(name) for name in values.values()]
    matching = [permute for permute in permutes if Permute.matches(permute)]
    if not matching or len(matching) != len(permutes):
        return
    orders = {permute.attributes["order"] for permute in matching}
    if len(orders) > 1:
        return
    (order,) = orders
    moved = operator_of(node).before_permute(node, order, graph)
    if moved is None:
        return
    sources = {name: graph.nodes[name].inputs["x"] for name in values.values()}
    inputs = {role: sources.get(name, name) for role, name in moved.inputs.items()}
    name = graph.fresh(f"{node.name}_unpermuted")
    graph.insert_before(node.name, replace(moved, name=name, inputs=inputs))
    graph.nodes[node.name] = Permute.instead_of(node, {"x": name}, order=order)
