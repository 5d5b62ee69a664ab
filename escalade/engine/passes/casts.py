"""Casts: the model's own to 16 bits, and those of a training step, of its inputs, its gradients and around layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph, Input
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.gradients import cast_of
from escalade.engine.nodes.identity import is_rounding


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


def drop_rounding(graph: Graph, dtype: str) -> None:
    """Drops the model's own casts to 16 bits where the plan rounds anyway: every value if its dtype has as few, and
    what is only returned, which is converted to the model's type."""
    types = dict(zip(graph.outputs, graph.output_types, strict=True))
    for node in graph:
        if not is_rounding(node, graph):
            continue
        source = next(iter(node.inputs.values()))
        is_only_returned = types.get(node.name) == node.dtype and not graph.readers(node.name)
        is_rounded = STORAGE[dtype].itemsize == 2 or is_only_returned
        if is_rounded and graph.dtype_of(source) is not torch.float64:
            graph.remove(node, instead=source)


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
