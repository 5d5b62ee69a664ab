"""Sequences (NCL) viewed as images (NCHW) of height 1, and layers on them as layers on those images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.base import AtenCall, Match, Matcher
from escalade.engine.nodes.views import SEQUENCE_RANK, Reshape

_ACROSS = {"padding": 0, "output_padding": 0}
"""Window arguments across the one row; 1 for the others."""
_WINDOWED = ("kernel_size", "stride", "padding", "output_padding", "dilation")


def image_shape(shape: Shape) -> Shape:
    """Return the shape of a sequence as an image."""
    return (*shape[:2], 1, *shape[2:])


def on_sequences(matcher: Matcher, x: str, weight: str | None = None) -> Matcher:
    """Return a matcher of layers on sequences by that of images; `x` and `weight` are names of arguments."""

    def match(node: Node, call: AtenCall, graph: Graph) -> Match:
        operand = call.value(x)
        kernel = call.value(weight) if weight else None
        if operand is None or len(node.shape) != SEQUENCE_RANK or (weight and kernel not in graph.constants):
            return None
        shape = image_shape(graph.shape_of(operand))
        image = Reshape.node(graph.fresh(f"{node.name}_row"), {"x": operand}, {}, shape, node.dtype)
        inputs = {role: image.name if name == operand else name for role, name in node.inputs.items()}
        if kernel is not None:
            filters = graph.derive_constant(f"{node.name}_weight", kernel, lambda kernel: kernel.unsqueeze(2))
            inputs = {role: filters if name == kernel else name for role, name in inputs.items()}
        arguments = {key: _image_argument(key, value) for key, value in node.attributes["arguments"].items()}
        viewed = replace(
            node,
            name=graph.fresh(f"{node.name}_image"),
            inputs=inputs,
            shape=image_shape(node.shape),
            attributes={**node.attributes, "arguments": arguments},
        )
        graph.append(image)
        made = matcher(viewed, AtenCall(viewed), graph)
        if not isinstance(made, Node):
            graph.remove(image, instead=operand)
            return None
        graph.append(made)
        return Reshape.instead_of(node, {"x": made.name})

    return match


def _image_argument(name: str, value: Any) -> Any:
    """Return an argument along a sequence as one of a window of one row."""
    if name not in _WINDOWED or value is None or isinstance(value, str) or value == ():
        return value
    (along,) = (value,) if isinstance(value, int) else tuple(value)
    return (_ACROSS.get(name, 1), along)
