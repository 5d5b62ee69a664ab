"""Counter buffers of a training step, such as `num_batches_tracked`; the caller increments all in one kernel."""

from __future__ import annotations

from collections.abc import Mapping

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import AtenCall, name_of


def drop_counters(graph: Graph, buffers: Mapping[int, str]) -> dict[int, int]:
    """Remove outputs that only add an integer to a buffer; return the increments by output index."""
    increments = {}
    for index, buffer in buffers.items():
        node = graph.nodes.get(graph.outputs[index])
        if (
            node is not None
            and set(node.inputs.values()) == {buffer}
            and (step := _increment(node)) is not None
        ):
            increments[index] = step
    kept = [index for index in range(len(graph.outputs)) if index not in increments]
    graph.outputs = tuple(graph.outputs[index] for index in kept)
    graph.output_types = tuple(graph.output_types[index] for index in kept)
    graph.remove_dead_code()
    return increments


def _increment(node: Node) -> int | None:
    """Return the integer that a node adds to a counter; None if it does anything else."""
    if not Aten.matches(node) or node.dtype != "int64" or name_of(node.attributes["target"]) != "add":
        return None
    call = AtenCall(node)
    other = call("other")
    return other if type(other) is int and call("alpha", 1) == 1 and call.value("self") is not None else None
