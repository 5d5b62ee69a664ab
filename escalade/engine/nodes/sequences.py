"""Sequences as images one row high: how layers along one dimension are recognised as those of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Recognised, Recogniser
from escalade.engine.nodes.reshape import Reshape

_ACROSS = {"padding": 0, "output_padding": 0}
"""What a window has across its one row, by argument; else 1."""
_WINDOWED = ("kernel_size", "stride", "padding", "output_padding", "dilation")


def image_of(shape: Shape) -> Shape:
    """The sizes of a sequence as an image."""
    return (*shape[:2], 1, *shape[2:])


def dimension_of_image(dimension: int) -> int:
    """Where a dimension of a sequence is in the image."""
    return dimension + (dimension >= 2)


def is_row(image: Shape, shape: Shape) -> bool:
    """Whether an image is one row high and a sequence of these sizes."""
    return len(shape) == 3 and len(image) == 4 and image == image_of(shape)


def of_sequences(recogniser: Recogniser, x: str, weight: str | None = None) -> Recogniser:
    """Recognises a layer of sequences by what recognises that of images: `x` and `weight` are its arguments' names."""

    def recognise(node: Node, call: AtenCall, graph: Graph) -> Recognised:
        given = call.value(x)
        kernel = call.value(weight) if weight else None
        if given is None or len(node.shape) != 3 or (weight and kernel not in graph.constants):
            return None
        image = Reshape.node(
            graph.fresh(f"{node.name}_row"), {"x": given}, {}, image_of(graph.shape_of(given)), node.dtype
        )
        inputs = {role: image.name if name == given else name for role, name in node.inputs.items()}
        if kernel is not None:
            filters = graph.add_constant(f"{node.name}_weight", graph.constants[kernel].unsqueeze(2))
            inputs = {role: filters if name == kernel else name for role, name in inputs.items()}
        arguments = {key: _pair(key, value) for key, value in node.attributes["arguments"].items()}
        seen = replace(
            node,
            name=graph.fresh(f"{node.name}_image"),
            inputs=inputs,
            shape=image_of(node.shape),
            attributes={**node.attributes, "arguments": arguments},
        )
        graph.append(image)
        made = recogniser(seen, AtenCall(seen), graph)
        if not isinstance(made, Node):
            graph.remove(image, instead=given)
            return None
        graph.append(made)
        return Reshape.instead_of(node, {"x": made.name})

    return recognise


def _pair(name: str, value: Any) -> Any:
    """An argument along the sequence as one of a window of one row."""
    if name not in _WINDOWED or value is None or isinstance(value, str) or value == ():
        return value
    (along,) = (value,) if isinstance(value, int) else tuple(value)
    return (_ACROSS.get(name, 1), along)
