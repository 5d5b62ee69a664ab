"""Buffers of a training step that only count, such as BatchNorm's batches: whoever runs the step adds to them all."""

from __future__ import annotations

from collections.abc import Mapping

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of


def drop_counters(graph: Graph, buffers: Mapping[int, str]) -> dict[int, int]:
    """What is added to each buffer whose output, by place, is nothing but the input plus a whole number; these outputs
    go."""
    found = {}
    for place, buffer in buffers.items():
        node = graph.nodes.get(graph.outputs[place])
        if node is not None and set(node.inputs.values()) == {buffer} and (step := _step(node)) is not None:
            found[place] = step
    kept = [place for place in range(len(graph.outputs)) if place not in found]
    graph.outputs = tuple(graph.outputs[place] for place in kept)
    graph.output_types = tuple(graph.output_types[place] for place in kept)
    graph.remove_dead_code()
    return found


def _step(node: Node) -> int | None:
    """The number that a node adds to a count; None if it does anything else."""
    if not Aten.matches(node) or node.dtype != "int64" or name_of(node.attributes["target"]) != "add":
        return None
    call = AtenCall(node)
    other = call("other")
    return other if type(other) is int and call("alpha", 1) == 1 and call.value("self") is not None else None
