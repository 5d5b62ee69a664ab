"""Ranges that a model carries: those of its own quantize, dequantize and fake-quantize calls.

Each reader of a quantized value gets the range as an attribute and reads the unquantized value, so that the calls block
no fusion. After all fusions the ranges are assigned to the values that the readers then read.
"""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.convert import FakeQuantize

CARRIED = "carried_ranges"
"""Attribute of a node: ranges of its inputs by role."""


def note_ranges(graph: Graph) -> None:
    """Remove quantization nodes, and store their ranges as attributes of the readers."""
    has_zero_points = 0
    for node in graph:
        if not FakeQuantize.matches(node) or node.name in graph.outputs:
            continue
        readers = graph.readers(node.name)
        if any(Aten.matches(reader) for reader in readers):
            continue  # PyTorch computes it as the model does
        largest = FakeQuantize.largest(node, graph.constants)
        for reader in readers:
            ranges = dict.fromkeys(reader.roles_of(node.name), largest)
            graph.nodes[reader.name] = reader.with_attributes(**{CARRIED: {**carried(reader), **ranges}})
        has_zero_points += bool(graph.constants[node.inputs["zero_point"]].any())
        graph.remove(node, instead=node.inputs["x"])
    if has_zero_points:
        graph.notes.append(
            f"{has_zero_points} quantized values of the model have zero points; 8-bit kernels have none, and cover the "
            "same numbers with codes that are symmetric about 0"
        )


def carried(node: Node) -> dict[str, float]:
    """Return the ranges that a node carries, by the role of its input."""
    return dict(node.attributes.get(CARRIED, {}))


def with_carried_range(fused: Node, absorbed: Node, role: str) -> Node:
    """Return the node with the range that an absorbed node had for the input that this one now reads as `role`."""
    value = fused.inputs[role]
    found = [largest for own, largest in carried(absorbed).items() if absorbed.inputs.get(own) == value]
    return fused.with_attributes(**{CARRIED: {**carried(fused), role: found[0]}}) if found else fused


def collect_ranges(graph: Graph) -> dict[str, float]:
    """Return the range of each value by name, and remove the attributes."""
    found: dict[str, float] = {}
    for node in graph:
        if CARRIED not in node.attributes:
            continue
        for role, largest in carried(node).items():
            if (value := node.inputs.get(role)) is not None:
                found[value] = max(found.get(value, 0.0), largest)
        plain = {key: value for key, value in node.attributes.items() if key != CARRIED}
        graph.nodes[node.name] = replace(node, attributes=plain)
    return found
