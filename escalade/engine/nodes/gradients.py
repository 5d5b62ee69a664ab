"""What nodes of training graphs share: the convolutions they belong to, gradients behind a ReLU, order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.signature import Sizes
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.expressions import IDENTITY, Expression

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
    found = masked_by(node, graph)
    return (node, found[1]) if node is not None and found is not None and found[0] == gradient.name else None


def masked_by(node: Node | None, graph: Graph) -> tuple[str, str] | None:
    """The gradient that a node is where a ReLU's result is positive, and that result, if it is such a node."""
    if not Pointwise.matches(node) or len(node.inputs) != 2:
        return None
    expression = Pointwise().expression(node)
    for gradient, result in (tuple(node.inputs), tuple(node.inputs)[::-1]):
        if expression == _BEHIND_RELU.rename({"gradient": gradient, "result": result}):
            names = node.inputs[gradient], node.inputs[result]
            alike = all(
                graph.shape_of(name) == node.shape and graph.dtype_of(name) == graph.dtype_of(node.name)
                for name in names
            )
            return names if alike and not graph.constants.keys() & set(names) else None
    return None


def cast_of(node: Node, graph: Graph) -> str | None:
    """The value that a node is in another floating type, if it is nothing else."""
    if not Pointwise.matches(node) or not node.is_floating or len(node.inputs) != 1:
        return None
    source = node.inputs["x"]
    same = graph.shape_of(source) == node.shape and graph.dtype_of(source).is_floating_point
    return source if same and Pointwise().expression(node) == IDENTITY else None


def depends_on(value: str, others: Iterable[str], graph: Graph) -> bool:
    """Whether a value is one of these, or computed from one."""
    wanted, seen, ahead = set(others), {value}, [value]
    while ahead:
        name = ahead.pop()
        if name in wanted:
            return True
        node = graph.nodes.get(name)
        more = set() if node is None else {*node.inputs.values()} - seen
        seen |= more
        ahead += more
    return False


def are_wide(values: Iterable[str | None], graph: Graph) -> bool:
    """Whether all of these are there, and of fp32."""
    return all(name is not None and graph.dtype_of(name) is torch.float32 for name in values)


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
