"""Fusion of a 1×1 shortcut convolution into the convolution that its result is added to."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.conv2d import Conv2d, has_one_input

CHANNEL_UNIT = 8  # channels of both inputs must fill 16-byte loads of 16-bit values


def fuse_shortcuts(graph: Graph) -> None:
    """Replace conv(x) + conv1x1(s) by one convolution that accumulates the products of both.

    The shortcut's result is neither written nor read.
    """
    for node in graph:
        if not Conv2d.matches(node) or "residual" not in node.inputs:
            continue
        if "residual" in activation_of(node).inputs:
            continue  # used in other ways than a plain addition
        shortcut = graph.nodes.get(node.inputs["residual"])
        if not Conv2d.matches(shortcut) or not _is_shortcut(graph, shortcut, node):
            continue
        fused = node.with_inputs(
            shortcut=shortcut.inputs["x"],
            shortcut_weight=shortcut.inputs["weight"],
            bias=_joint_bias(graph, node, shortcut),
            residual=None,
        ).with_attributes(shortcut_stride=shortcut.attributes["stride"][0])
        graph.nodes[node.name] = replace(fused, source=joint_source(node, shortcut))
        del graph.nodes[shortcut.name]


def _is_shortcut(graph: Graph, shortcut: Node, node: Node) -> bool:
    if not activation_of(shortcut).is_identity or not has_one_input(shortcut):
        return False
    if graph.only_user(shortcut.name) is not node:
        return False
    a, weight = shortcut.attributes, graph.constants[shortcut.inputs["weight"]]
    channels = weight.shape[1], graph.constants[node.inputs["weight"]].shape[1]
    return (
        tuple(weight.shape[2:]) == (1, 1)
        and a["stride"][0] == a["stride"][1]
        and a["padding"] == (0, 0)
        and a["groups"] == node.attributes["groups"] == 1
        and all(count % CHANNEL_UNIT == 0 for count in channels)
    )


def _joint_bias(graph: Graph, node: Node, shortcut: Node) -> str | None:
    biases = [layer.inputs["bias"] for layer in (node, shortcut) if "bias" in layer.inputs]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.constants[biases[0]].double() + graph.constants[biases[1]].double()
    return graph.add_constant(f"{node.name}_bias", both.float())
