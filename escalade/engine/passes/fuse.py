"""Additions and activations done on the way out of the operation in front of them."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node

_TAKE_RELU = ("conv2d", "linear", "batch_norm", "add")
_TAKE_RESIDUAL = ("conv2d", "batch_norm")


def fuse_residuals(graph: Graph) -> None:
    """conv(x) + y becomes the convolution's own last step; it then runs where the addition did.

    If both terms come from convolutions the one with more weights takes the other, which may turn out to be a
    shortcut.
    """
    for node in graph:
        if node.op != "add":
            continue
        sides = [(node.inputs["x"], node.inputs["residual"]), (node.inputs["residual"], node.inputs["x"])]
        layers = [
            (graph.nodes[side], rest)
            for side, rest in sides
            if side != rest and rest not in graph.constants and _can_add(graph, side, node)
        ]
        if not layers:
            continue
        layer, rest = max(layers, key=lambda pair: _weights(graph, pair[0]))
        fused = layer.with_inputs(residual=rest).with_attributes(relu=node.attributes["relu"])
        graph.nodes[node.name] = replace(fused, name=node.name)
        del graph.nodes[layer.name]


def _can_add(graph: Graph, value: str, node: Node) -> bool:
    layer = graph.nodes.get(value)
    return (
        layer is not None
        and layer.op in _TAKE_RESIDUAL
        and not layer.attributes["relu"]
        and "residual" not in layer.inputs
        and graph.only_user(layer.name) is node
    )


def _weights(graph: Graph, layer: Node) -> int:
    return graph.constants[layer.inputs["weight"]].numel()


def fuse_activations(graph: Graph) -> None:
    """relu(conv(x)) becomes the convolution's own last step; a ReLU6 stays a step of its own."""
    for node in graph:
        if node.op != "relu" or node.attributes["limit"] is not None:
            continue
        layer = graph.nodes.get(node.inputs["x"])
        if layer is None or layer.op not in _TAKE_RELU or layer.attributes["relu"]:
            continue
        if graph.only_user(layer.name) is node:
            graph.nodes[layer.name] = layer.with_attributes(relu=True)
            graph.remove(node, instead=layer.name)


def fuse_shortcuts(graph: Graph) -> None:
    """A 1×1 convolution whose result is only added to another convolution's becomes more of its products.

    Nothing is written for the shortcut and nothing read again: the products of both go into one sum.
    """
    for node in graph:
        if node.op != "conv2d" or "residual" not in node.inputs:
            continue
        short = graph.nodes.get(node.inputs["residual"])
        if short is None or not _is_shortcut(graph, short, node):
            continue
        inputs = {
            **node.inputs,
            "shortcut": short.inputs["x"],
            "shortcut_weight": short.inputs["weight"],
            "bias": _joint_bias(graph, node, short),
        }
        del inputs["residual"]
        stride = short.attributes["stride"][0]
        graph.nodes[node.name] = replace(
            node.with_attributes(shortcut_stride=stride),
            inputs={role: name for role, name in inputs.items() if name is not None},
            source=", ".join(dict.fromkeys((node.source, short.source))),
        )
        del graph.nodes[short.name]


def _is_shortcut(graph: Graph, short: Node, node: Node) -> bool:
    if short.op != "conv2d" or short.attributes["relu"] or {"residual", "shortcut"} & short.inputs.keys():
        return False
    if graph.only_user(short.name) is not node:
        return False
    weight = graph.constants[short.inputs["weight"]]
    stride = short.attributes["stride"]
    return (
        tuple(weight.shape[2:]) == (1, 1)
        and stride[0] == stride[1]
        and short.attributes["padding"] == (0, 0)
        and short.attributes["groups"] == node.attributes["groups"] == 1
        and weight.shape[1] % 8 == 0
        and graph.constants[node.inputs["weight"]].shape[1] % 8 == 0
    )


def _joint_bias(graph: Graph, node: Node, short: Node) -> str | None:
    biases = [layer.inputs["bias"] for layer in (node, short) if "bias" in layer.inputs]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.constants[biases[0]].double() + graph.constants[biases[1]].double()
    return graph.add_constant(f"{node.name}_bias", both.float())
