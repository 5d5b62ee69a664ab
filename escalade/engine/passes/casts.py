"""Casts at the ends of a training step: of inputs, which come in all at once, and of gradients, which need none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes.pointwise import Pointwise
from escalade.ops.expressions import IDENTITY


@dataclass(frozen=True)
class Cast:
    """An input that holds another input's numbers, in its own type."""

    name: str
    of: str
    dtype: torch.dtype


def lift_casts(graph: Graph) -> list[Cast]:
    """Makes inputs of what is nothing but an input in another type: whoever runs the graph casts them all in one go."""
    given = {one.name for one in graph.inputs}
    made: dict[tuple[str, str], Cast] = {}
    for node in graph:
        source = _cast_of(node)
        if source is None or source not in given or node.name in graph.outputs:
            continue
        cast = made.setdefault((source, node.dtype), Cast(node.name, source, getattr(torch, node.dtype)))
        graph.remove(node, instead=cast.name)
        if cast.name == node.name:
            graph.inputs = (*graph.inputs, Input(node.name, node.shape, node.dtype))
    return list(made.values())


def drop_output_casts(graph: Graph, outputs: range) -> None:
    """Returns, of these outputs, what is cast instead of the cast."""
    found, types = list(graph.outputs), list(graph.output_types)
    for place in outputs:
        node = graph.nodes.get(found[place])
        source = None if node is None else _cast_of(node)
        if source is not None and source in graph.nodes:
            found[place], types[place] = source, graph.nodes[source].dtype
    graph.outputs, graph.output_types = tuple(found), tuple(types)
    graph.remove_dead_code()


def _cast_of(node: Node) -> str | None:
    """The value that a node is in another floating type, if it is nothing else."""
    if not Pointwise.matches(node) or not node.is_floating or len(node.inputs) != 1:
        return None
    return node.inputs["x"] if Pointwise().expression(node) == IDENTITY else None
