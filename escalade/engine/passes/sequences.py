"""Sequences (NCL) kept as images of height 1 between layers, which avoids layout conversions."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.sequences import image_shape
from escalade.engine.nodes.signature import Attributes
from escalade.engine.nodes.views import Concatenate, Reshape, Slice


def keep_sequences_as_images(graph: Graph) -> None:
    """Apply nodes between two 1-D layers to images of height 1, so that the views in between cancel."""
    for node in graph:
        if Reshape.matches(node):
            _view_image_directly(graph, node)
        elif len(node.shape) == 3 and node.is_floating:
            _apply_to_image(graph, node)
    graph.remove_dead_code()


def _view_image_directly(graph: Graph, node: Node) -> None:
    """Turn a view of an image's sequence into a view of the image."""
    image = _image(graph, node.inputs["x"])
    if image is None:
        return
    if graph.shape_of(image) == node.shape:
        graph.remove(node, instead=image)
    else:
        graph.nodes[node.name] = node.with_inputs(x=image)


def _apply_to_image(graph: Graph, node: Node) -> None:
    attributes = _image_attributes(node)
    if attributes is None:
        return
    inputs = {}
    for role, name in node.inputs.items():
        if name in graph.constants:
            constant = graph.constants[name]
            inputs[role] = (
                graph.add_constant(f"{name}_row", constant.unsqueeze(-2)) if constant.dim() > 1 else name
            )
            continue
        image = _image(graph, name)
        if image is None:
            return
        inputs[role] = image
    on_image = replace(
        node,
        name=graph.fresh(f"{node.name}_image"),
        inputs=inputs,
        attributes=attributes,
        shape=image_shape(node.shape),
    )
    graph.insert_before(node.name, on_image)
    graph.nodes[node.name] = Reshape.instead_of(node, {"x": on_image.name})


def _image(graph: Graph, name: str) -> str | None:
    """Return the image of height 1 that a value is a sequence view of."""
    node = graph.nodes.get(name)
    if not Reshape.matches(node) or "order" in node.attributes:
        return None
    image = node.inputs["x"]
    return image if len(node.shape) == 3 and graph.shape_of(image) == image_shape(node.shape) else None


def _image_attributes(node: Node) -> Attributes | None:
    """Return the attributes of a node that is applied to images of height 1; None if it cannot be."""
    a = node.attributes
    if Concatenate.matches(node) or Slice.matches(node):
        return {**a, "dimension": _image_dim(a["dimension"])}
    if Reduce.matches(node):
        return {**a, "dims": tuple(map(_image_dim, a["dims"]))} if a["keepdim"] else None
    operator = operator_of(node)
    return a if operator.takes_any_rank or operator.expression(node) is not None else None


def _image_dim(dim: int) -> int:
    return dim + (dim >= 2)
