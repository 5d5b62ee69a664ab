"""NHWC inside: where a network's values have to change their order, and where they need not after all."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.convert import Convert


def reorder_flattened(graph: Graph) -> None:
    """Linear layers behind a flattened image take the pixels in the order they lie in: their weights are reordered."""
    users = graph.users()
    for node in graph:
        if not operator_of(node).is_view or not _flattens_image(graph, node) or node.name in graph.outputs:
            continue
        layers = users.get(node.name, [])
        if not layers or not all(_reorderable(layer, node.name) for layer in layers):
            continue
        channels, height, width = graph.shape_of(node.inputs["x"])[1:]
        for layer in layers:
            inputs = {}
            for role in operator_of(layer).feature_constants(layer):
                given = graph.constants[layer.inputs[role]]
                moved = given.reshape(-1, channels, height, width).permute(0, 2, 3, 1).reshape(given.shape)  # type: ignore[arg-type]
                inputs[role] = graph.add_constant(f"{layer.name}_{role}", moved.contiguous())
            graph.nodes[layer.name] = graph.nodes[layer.name].with_inputs(**inputs)
        graph.nodes[node.name] = node.with_attributes(order="nhwc")


def _reorderable(layer: Node, value: str) -> bool:
    return bool(operator_of(layer).feature_constants(layer)) and layer.inputs["x"] == value


def _flattens_image(graph: Graph, node: Node) -> bool:
    before, after = graph.shape_of(node.inputs["x"]), node.shape
    return len(before) == 4 and len(after) == 2 and before[0] == after[0] and before[2:] != (1, 1)


def convert_inputs(graph: Graph, pad_channels: bool) -> None:
    """Images are converted once, in front of the first operation that wants them in NHWC.

    With `pad_channels` those that only convolutions read get zero channels up to what a kernel loads at once.
    """
    for given in graph.inputs:
        readers = graph.users().get(given.name, [])
        if len(given.shape) != 4 or not getattr(torch, given.dtype).is_floating_point or not readers:
            continue
        normalise = next((node for node in readers if operator_of(node).is_image_scaling), None)
        inputs = {"x": given.name}
        name = graph.fresh(f"{given.name}_nhwc")
        as_it_comes = {
            node.name for node in readers if operator_of(node).takes_image_as_it_comes(node, given)
        }
        if normalise is not None:
            inputs |= {"scale": normalise.inputs["scale"], "shift": normalise.inputs["shift"]}
            graph.remove(normalise, instead=given.name)
            readers = graph.users().get(given.name, [])
        readers = [node for node in readers if node.name not in as_it_comes]
        is_returned = normalise is not None and given.name in graph.outputs  # once it is normalised
        if not readers and not is_returned:
            continue
        channels = given.shape[1]
        assert isinstance(channels, int)
        padded = channels
        if pad_channels and readers and all(_pads(graph, node, given.name) for node in readers):
            padded = 4 if channels <= 4 else -(-channels // 8) * 8
        shape = (given.shape[0], padded, *given.shape[2:])
        node = Convert.node(name, inputs, {"layout": "nhwc"}, shape)
        for reader in readers:
            if padded != channels:
                _pad_weight(graph, reader, padded - channels)
            current = graph.nodes[reader.name]
            changed = {role: name if value == given.name else value for role, value in current.inputs.items()}
            graph.nodes[reader.name] = replace(current, inputs=changed)
        graph.outputs = tuple(name if output == given.name else output for output in graph.outputs)
        if readers:
            graph.insert_before(readers[0].name, node)
        else:
            graph.append(node)


def _pads(graph: Graph, node: Node, value: str) -> bool:
    return (
        operator_of(node).pads_channels(node)
        and [role for role, name in node.inputs.items() if name == value] == ["x"]
        and value not in graph.outputs
    )


def _pad_weight(graph: Graph, node: Node, channels: int) -> None:
    weight = graph.constants[node.inputs["weight"]]
    padded = F.pad(weight, (0, 0, 0, 0, 0, channels))
    name = graph.add_constant(f"{node.name}_weight", padded)
    graph.nodes[node.name] = graph.nodes[node.name].with_inputs(weight=name)


def convert_between(graph: Graph) -> None:
    """Converts in front of reshapes that need rows in PyTorch's order, behind those that make images, and at the
    outputs."""
    for node in graph:
        if not operator_of(node).is_view or "order" in node.attributes:
            continue
        before = graph.shape_of(node.inputs["x"])
        if len(before) == 4 and before[2:] != (1, 1) and _lies_in_nhwc(graph, node.inputs["x"]):
            name = _converted(graph, node.inputs["x"], "nchw", node.name)
            graph.nodes[node.name] = node.with_inputs(x=name)
        if len(node.shape) == 4 and node.is_floating:
            image = replace(node, name=graph.fresh(f"{node.name}_nchw"), inputs=graph.nodes[node.name].inputs)
            graph.insert_before(node.name, image.with_attributes(layout="nchw"))
            graph.nodes[node.name] = Convert.instead_of(node, {"x": image.name}, layout="nhwc")
    for output in dict.fromkeys(graph.outputs):
        if len(graph.shape_of(output)) == 4 and _lies_in_nhwc(graph, output):
            name = _converted(graph, output, "nchw", None)
            graph.outputs = tuple(name if value == output else value for value in graph.outputs)


def _lies_in_nhwc(graph: Graph, value: str) -> bool:
    node = graph.nodes.get(value)
    return node is not None and operator_of(node).layout(node) == "nhwc"


def _converted(graph: Graph, value: str, layout: str, before: str | None) -> str:
    shape = graph.shape_of(value)
    name = graph.fresh(f"{value}_{layout}")
    node = Convert.node(name, {"x": value}, {"layout": layout}, shape)
    if before is None:
        graph.append(node)
    else:
        graph.insert_before(before, node)
    return name
