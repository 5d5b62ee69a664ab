"""Sequences stay images between the layers that see them so: nothing has to be put in PyTorch's order in between."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.sequences import image_of, is_row


def keep_images(graph: Graph) -> None:
    """What stands between two layers of sequences is done to the images that they are, and their views cancel."""
    for node in graph:
        if Reshape.matches(node):
            _skip(graph, node)
        elif len(node.shape) == 3 and node.is_floating:
            _done_to_images(graph, node)
    graph.remove_dead_code()


def _skip(graph: Graph, node: Node) -> None:
    """A view of an image's sequence is one of the image."""
    image = _image(graph, node.inputs["x"])
    if image is None:
        return
    if graph.shape_of(image) == node.shape:
        graph.remove(node, instead=image)
    else:
        graph.nodes[node.name] = node.with_inputs(x=image)


def _done_to_images(graph: Graph, node: Node) -> None:
    attributes = operator_of(node).as_image(node)
    if attributes is None:
        return
    inputs = {}
    for role, name in node.inputs.items():
        if name in graph.constants:
            given = graph.constants[name]
            inputs[role] = graph.add_constant(f"{name}_row", given.unsqueeze(-2)) if given.dim() > 1 else name
            continue
        image = _image(graph, name)
        if image is None:
            return
        inputs[role] = image
    made = replace(
        node,
        name=graph.fresh(f"{node.name}_image"),
        inputs=inputs,
        attributes=attributes,
        shape=image_of(node.shape),
    )
    graph.insert_before(node.name, made)
    graph.nodes[node.name] = Reshape.instead_of(node, {"x": made.name})


def _image(graph: Graph, name: str) -> str | None:
    """The image one row high whose sequence a value is."""
    node = graph.nodes.get(name)
    if not Reshape.matches(node) or "order" in node.attributes:
        return None
    image = node.inputs["x"]
    return image if is_row(graph.shape_of(image), node.shape) else None
