"""Side outputs: buffers that the kernels of another node write besides its result, such as argmax indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.base import Layouts, Match, Operator, Tensors
from escalade.engine.nodes.lowering import SideBuffer

_PRODUCER = "of"
"""Role of the node that writes the buffer."""


class SideOutput(Operator):
    """Another result of a node. It reads the same inputs, so that PyTorch can compute it by itself."""

    name = "further"

    def __init__(self, operators: Callable[[str], Operator]) -> None:
        """`operators` looks one up by its name."""
        self._operators = operators

    def _producer(self, node: Node) -> Operator:
        return self._operators(node.attributes["operator"])

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        own = {role: tensor for role, tensor in inputs.items() if role != _PRODUCER}
        return self._producer(node).side_outputs(node, own)[node.attributes["buffer"]]

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        own = {role: layout for role, layout in given.items() if role != _PRODUCER}
        return self._producer(node).layouts(node, own)

    def title(self, node: Node) -> str:
        return f"{node.attributes['buffer']} of {node.attributes['operator']}"

    @classmethod
    def of(cls, producer: Node, name: str, buffer: str, shape: Shape, dtype: str) -> Node:
        attributes = {**producer.attributes, "operator": producer.op, "buffer": buffer}
        inputs = {**producer.inputs, _PRODUCER: producer.name}
        return replace(cls.node(name, inputs, attributes, shape, dtype), source=producer.source)


def with_producer(side_output: Node, producer: Node) -> Node:
    """Return a side output as that of another node."""
    buffer = side_output.attributes["buffer"]
    return SideOutput.of(producer, side_output.name, buffer, side_output.shape, side_output.dtype)


def side_buffer_of(node: Node) -> SideBuffer | None:
    """Return the buffer that holds a side output; None for other nodes."""
    if not SideOutput.matches(node):
        return None
    return SideBuffer(node.inputs[_PRODUCER], node.attributes["buffer"])


def insert_side_output(graph: Graph, producer: Node, side_output: Node) -> None:
    """Replace a producer, and move its side output right after it, where it keeps no value alive for longer."""
    rest = [node for node in graph if node.name != side_output.name]
    order = (
        one for old in rest for one in ((producer, side_output) if old.name == producer.name else (old,))
    )
    graph.arrange(order)


def side_outputs_of(producer: Node, graph: Graph) -> list[Node]:
    readers = graph.readers(producer.name)
    return [node for node in readers if SideOutput.matches(node) and node.inputs[_PRODUCER] == producer.name]


def replace_producer(graph: Graph, producer: Node) -> None:
    """Replace the node of the same name, also as the producer of its side outputs."""
    for side_output in side_outputs_of(producer, graph):
        graph.nodes[side_output.name] = with_producer(side_output, producer)
    graph.nodes[producer.name] = producer


def readers_of(producer: Node, graph: Graph) -> list[Node]:
    """Return the nodes that read a node's result, without its side outputs."""
    own = {node.name for node in side_outputs_of(producer, graph)}
    return [node for node in graph.readers(producer.name) if node.name not in own]


def match_side_output(operator: Operator, node: Node, buffers: tuple[str, ...], graph: Graph) -> Match:
    """Match another result of a PyTorch call whose first result is a node of the operator."""
    source, result = node.attributes["call"], node.attributes["result"]
    # From the end: a call's results are captured one after the other.
    recent = reversed(graph.nodes.values())
    producers = (one for one in recent if operator.matches(one) and one.attributes["source"] == source)
    producer = next(producers, None)
    if producer is None:
        return None
    return SideOutput.of(producer, node.name, buffers[result - 1], node.shape, node.dtype)
