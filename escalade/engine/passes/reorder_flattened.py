"""Weights of linear layers reordered to read a flattened NHWC image, which then needs no conversion."""

from __future__ import annotations

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.mlp import Mlp


def reorder_flattened(graph: Graph) -> None:
    """Reorder the weights of all layers that read a flattened NHWC image, if each of them can be reordered."""
    users, layouts = graph.users(), _natural_layouts(graph)
    for node in graph:
        if not operator_of(node).is_view or not _flattens_image(graph, node) or node.name in graph.outputs:
            continue
        if layouts.get(node.inputs["x"]) != "nhwc":
            continue
        layers = users.get(node.name, [])
        if not layers or not all(feature_constants(one) and one.inputs["x"] == node.name for one in layers):
            continue
        channels, height, width = graph.shape_of(node.inputs["x"])[1:]
        for layer in layers:
            inputs = {}
            for role in feature_constants(layer):
                weight = graph.constants[layer.inputs[role]]
                images = weight.reshape(-1, channels, height, width)  # type: ignore[arg-type]
                reordered = images.permute(0, 2, 3, 1).reshape(weight.shape)
                inputs[role] = graph.add_constant(f"{layer.name}_{role}", reordered.contiguous())
            graph.nodes[layer.name] = graph.nodes[layer.name].with_inputs(**inputs)
        graph.nodes[node.name] = node.with_attributes(order="nhwc")


def feature_constants(layer: Node) -> tuple[str, ...]:
    """Return the roles of all constants with one column per feature of x; empty if these cannot be reordered."""
    if Linear.matches(layer):
        return ("weight",)
    # A chain must read the features as one group, and not be compared with them.
    if (
        not Mlp.matches(layer)
        or layer.attributes["layers"][0].groups != 1
        or layer.attributes["output"] != "y"
    ):
        return ()
    return tuple(role for role in ("norm_bias0", "norm_weight0", "weight0") if role in layer.inputs)


def _flattens_image(graph: Graph, node: Node) -> bool:
    before, after = graph.shape_of(node.inputs["x"]), node.shape
    return len(before) == 4 and len(after) == 2 and before[0] == after[0] and before[2:] != (1, 1)


def _natural_layouts(graph: Graph) -> dict[str, str]:
    """Return the layout in which each image is produced, without conversions."""
    layouts = {
        entry.name: graph.images
        for entry in graph.inputs
        if len(entry.shape) == 4 and graph.dtype_of(entry.name).is_floating_point
    }
    for node in graph:
        if len(node.shape) == 4 and node.is_floating:
            operand_layouts = {role: layouts[name] for role, name in node.inputs.items() if name in layouts}
            written = operator_of(node).layouts(node, operand_layouts).written
            layouts[node.name] = node.attributes.get("layout", written)
    return layouts
