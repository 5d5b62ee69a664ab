"""What nodes of training graphs share: the convolutions they belong to, gradients behind a ReLU, order."""

from __future__ import annotations

from typing import Any

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.signature import Sizes
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.expressions import Expression

_BEHIND_RELU = Expression.parse("where(result <= 0, 0, gradient)")


def convolution_of(
    node: Node, image: Sizes, filters: Sizes, dtype: str, bias: bool = False, **more: Any
) -> Conv2dProblem:
    """The convolution whose window a node has, of images and filters of these sizes."""
    batch, channels, height, width = image
    count, _, rows, columns = filters
    a = node.attributes
    return Conv2dProblem(
        batch, channels, height, width, count, rows, columns, a["stride"], a["padding"], a["dilation"], a["groups"],
        dtype, "nhwc", bias, **more,
    )  # fmt: skip


def through_relu(gradient: Node, graph: Graph) -> tuple[Node, str] | None:
    """The node that a gradient goes through a ReLU's backward pass by, with the ReLU's result, if nobody else reads it
    and it keeps its type."""
    node = graph.only_user(gradient.name)
    if not Pointwise.matches(node) or len(node.inputs) != 2 or node.dtype != gradient.dtype:
        return None
    own = next(role for role, name in node.inputs.items() if name == gradient.name)
    other = next(role for role in node.inputs if role != own)
    if Pointwise().expression(node) != _BEHIND_RELU.rename({"gradient": own, "result": other}):
        return None
    result = node.inputs[other]
    alike = graph.shape_of(result) == gradient.shape and graph.dtype_of(result) == graph.dtype_of(node.name)
    return (node, result) if alike else None


def put_in_order(graph: Graph) -> None:
    """Nodes behind what they read, otherwise as they come: for whoever gives one of them more to read."""
    ordered: dict[str, Node] = {}
    waiting = list(reversed(graph.nodes.values()))
    while waiting:
        node = waiting.pop()
        if node.name in ordered:
            continue
        missing = [
            graph.nodes[name] for name in node.inputs.values() if name in graph.nodes and name not in ordered
        ]
        if missing:
            waiting += [node, *reversed(missing)]
        else:
            ordered[node.name] = node
    graph.nodes = ordered
