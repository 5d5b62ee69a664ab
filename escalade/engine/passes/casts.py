"""Casts of a training step: of inputs, which come in all at once, of gradients, which need none, and around layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Graph, Input
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.gradients import cast_of


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
        source = cast_of(node, graph)
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
        source = None if node is None else cast_of(node, graph)
        if source is not None and source in graph.nodes:
            found[place], types[place] = source, graph.nodes[source].dtype
    graph.outputs, graph.output_types = tuple(found), tuple(types)
    graph.remove_dead_code()


def narrow_layers(graph: Graph) -> None:
    """Has layers read and write the narrow type that autocast casts to a wide one in front of them and back behind:
    their kernels compute in fp32 all the same."""
    for node in graph:
        if not operator_of(node).computes_in_fp32 or node.name in graph.outputs or not node.inputs:
            continue
        given = {role: graph.nodes.get(name) for role, name in node.inputs.items()}
        sources = {role: None if one is None else cast_of(one, graph) for role, one in given.items()}
        readers = graph.readers(node.name)
        types = {graph.dtype_of(name) if name is not None else None for name in sources.values()}
        types |= {graph.dtype_of(one.name) if cast_of(one, graph) else None for one in readers}
        (narrow,) = types if len(types) == 1 else (None,)
        if narrow not in (torch.float16, torch.bfloat16) or any(one.name in graph.outputs for one in readers):
            continue
        dtype = str(narrow).removeprefix("torch.")
        graph.nodes[node.name] = replace(node.with_inputs(**sources), dtype=dtype)
        for reader in readers:
            graph.remove(reader, instead=node.name)
    graph.remove_dead_code()
