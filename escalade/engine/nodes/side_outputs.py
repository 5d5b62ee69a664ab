"""What the kernels of another node compute beside its result: places of maxima, the gradient of a bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import Beside

_MAKER = "of"
"""The role of the node that has it."""


class Further(Operator):
    """Another result of a node, which reads what that does: PyTorch computes it by itself."""

    name = "further"

    def __init__(self, operators: Callable[[str], Operator]) -> None:
        self._operator = operators

    def _maker(self, node: Node) -> Operator:
        return self._operator(node.attributes["operator"])

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        own = {role: tensor for role, tensor in inputs.items() if role != _MAKER}
        return self._maker(node).further(node, own)[node.attributes["buffer"]]

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return self._maker(node).layouts(node, {role: lies for role, lies in given.items() if role != _MAKER})

    def layout(self, node: Node) -> str:
        """Images lie as the kernels of the maker write them, in NHWC."""
        return "nhwc" if len(node.shape) == 4 else "flat"

    def beside(self, node: Node) -> Beside:
        return Beside(node.inputs[_MAKER], node.attributes["buffer"])

    def title(self, node: Node) -> str:
        return f"{node.attributes['buffer']} of {node.attributes['operator']}"

    @classmethod
    def of(cls, maker: Node, name: str, buffer: str, shape: Shape, dtype: str) -> Node:
        """A further result of a node, under a name."""
        attributes = {**maker.attributes, "operator": maker.op, "buffer": buffer}
        return replace(
            cls.node(name, {**maker.inputs, _MAKER: maker.name}, attributes, shape, dtype),
            source=maker.source,
        )


def put_beside(graph: Graph, maker: Node, further: Node) -> None:
    """Puts a further result right behind its maker, so that it keeps nothing alive for longer."""
    rest = [node for node in graph if node.name != further.name]
    order = (one for old in rest for one in ((maker, further) if old.name == maker.name else (old,)))
    graph.nodes = {one.name: one for one in order}


def furthers_of(maker: Node, graph: Graph) -> list[Node]:
    """The further results of a node."""
    readers = graph.readers(maker.name)
    return [node for node in readers if Further.matches(node) and node.inputs[_MAKER] == maker.name]


def readers_of(maker: Node, graph: Graph) -> list[Node]:
    """The nodes that read a node's first result."""
    own = {node.name for node in furthers_of(maker, graph)}
    return [node for node in graph.readers(maker.name) if node.name not in own]
