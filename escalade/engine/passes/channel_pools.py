"""Pools over the channels of images, as local response normalization has them, in NHWC."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.pools import AvgPool2d, MaxPool2d
from escalade.engine.nodes.rearrange import Pad2d
from escalade.engine.nodes.views import CHANNELS_FIRST, CHANNELS_LAST, Permute, Reshape

_PAIRS = ("kernel", "stride", "padding", "dilation")
"""Attributes for rows and columns, which change places."""


def pool_channels_last(graph: Graph) -> None:
    """Let windows over channels slide along the rows of NHWC pixels.

    A model views an image as [batch, 1, channels, pixels] for them. In PyTorch's order that takes a conversion before
    and one after.
    """
    for node in graph:
        image = _image_of(graph, node)
        if image is None or not _is_nhwc(graph, image):
            continue
        chain = [node]
        while (reader := graph.only_user(chain[-1].name)) is not None:
            chain.append(reader)
            if not _is_windowed(reader):
                break
        windowed, last = chain[1:-1], chain[-1]
        if windowed and Reshape.matches(last):
            _transpose(graph, image, windowed, last, graph.shape_of(image)[2:])
    graph.remove_dead_code()


def _image_of(graph: Graph, node: Node) -> str | None:
    """Return the image whose channels and pixels a node views as rows and columns."""
    if not Reshape.matches(node) or len(node.shape) != 4 or node.shape[1] != 1:
        return None
    image = node.inputs["x"]
    shape = graph.shape_of(image)
    return image if len(shape) == 4 and (shape[0], shape[1]) == (node.shape[0], node.shape[2]) else None


def _is_nhwc(graph: Graph, name: str) -> bool:
    """Return True if a layer computes a value in NHWC, or others do that it is a pointwise function of."""
    node = graph.nodes.get(name)
    if node is None:
        return False
    operator = operator_of(node)
    if operator.expression(node) is None:
        return operator.preferred_layout == "nhwc" and not Reshape.matches(node)
    return any(_is_nhwc(graph, value) for value in node.inputs.values())


def _is_windowed(node: Node) -> bool:
    """Return True if a node pads or pools rows only."""
    a = node.attributes
    if Pad2d.matches(node):
        return not any(a["pads"][2:])
    is_pool = AvgPool2d.matches(node) or MaxPool2d.matches(node)
    return is_pool and all(a[key][1] == (key != "padding") for key in _PAIRS if key in a)


def _transposed(node: Node) -> Node:
    a, (batch, channels, rows, columns) = node.attributes, node.shape
    changed = {key: (a[key][1], a[key][0]) for key in _PAIRS if key in a}
    if "pads" in a:
        changed["pads"] = (*a["pads"][2:], *a["pads"][:2])
    return replace(node.with_attributes(**changed), shape=(batch, channels, columns, rows))


def _transpose(graph: Graph, image: str, windowed: list[Node], last: Node, sides: Shape) -> None:
    batch, _, channels, _ = windowed[-1].shape
    before = graph.shape_of(image)[1]

    def add(node: Node) -> str:
        graph.insert_before(last.name, node)
        return node.name

    def view(kind: type[Permute | Reshape], value: str, shape: Shape, **attributes: Shape) -> str:
        return add(kind.node(graph.fresh(f"{value}_rows"), {"x": value}, attributes, shape, last.dtype))

    pixels = windowed[-1].shape[3]
    value = view(Permute, image, (batch, *sides, before), order=CHANNELS_LAST)
    value = view(Reshape, value, (batch, 1, pixels, before))
    for node in windowed:
        moved = _transposed(node).with_inputs(x=value)
        value = add(replace(moved, name=graph.fresh(f"{node.name}_rows")))
    value = view(Reshape, value, (batch, *sides, channels))
    value = view(Permute, value, (batch, channels, *sides), order=CHANNELS_FIRST)
    while (reader := graph.only_user(last.name)) is not None and Reshape.matches(reader):
        graph.remove(last, instead=value)  # squeeze, then view: only the last shape counts
        last = graph.nodes[reader.name]
    if last.shape == graph.shape_of(value):
        graph.remove(last, instead=value)
    else:
        graph.nodes[last.name] = last.with_inputs(x=value)
