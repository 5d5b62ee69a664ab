"""Convolutions of images whose pixels were repeated, by filters that are summed up beforehand.

A filter over an image of twice the size, each pixel of which is there four times, meets pixels of the small image in
sums of its own: y = conv(nearest(x), w) is the transposed convolution of x with stride 2 by w turned around, each pixel
of it a sum of up to four. Its gradients are a convolution with stride 2 and the gradient of that one's weights. For
3x3 filters that is 16 products instead of 36, and the large image is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Sequence

from escalade.engine.graph.graph import Graph, Node, Reference, Shape
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.avg_pool2d import AvgPool2d
from escalade.engine.nodes.signature import Attributes

TWICE = (2, 2)


def is_repeated(attributes: Attributes, small: Shape) -> bool:
    """Whether an image of this size is made twice as large by its nearest pixels, in an upsampling or its gradient."""
    found = zip(attributes["output"], attributes["factors"], small[2:], strict=True)
    return attributes["mode"] == "nearest" and all(
        isinstance(size, int) and output == 2 * size and factor in (0.0, 2.0)
        for output, factor, size in found
    )


def is_dense(layer: Node, filters: Shape) -> bool:
    """Whether a convolution, or a gradient of one, has a filter of more than a pixel, and reads every pixel by it."""
    a = layer.attributes
    return (a["stride"], a["dilation"], a["groups"]) == ((1, 1), (1, 1), 1) and all(
        isinstance(size, int) and padding < size and size > 1
        for size, padding in zip(filters[2:], a["padding"], strict=True)
    )


def around(layer: Node, filters: Shape) -> tuple[int, int]:
    """The padding that filters turned around have."""
    padding: Sequence[int] = layer.attributes["padding"]
    down, along = (size - 1 - own for size, own in zip(filters[2:], padding, strict=True))  # type: ignore[operator]
    return down, along


def summed(weight: str, graph: Graph) -> str:
    """The filters turned around, each pixel a sum of up to four, with channels in the place of filters; made once."""
    name = f"{weight}_summed"
    if name not in graph.nodes:
        _turned(weight, name, 1, graph)
    return name


def unsummed(gradient: Node, name: str, graph: Graph) -> Node:
    """The gradient of filters, of that of what they are summed up to."""
    graph.append(gradient)
    _turned(gradient.name, name, 0, graph)
    return graph.nodes[name]


def _turned(value: str, name: str, zeros: int, graph: Graph) -> None:
    """Sums over windows of two by two, with so many zeros around, turned around, and the first dimensions swapped."""
    first, second, *size = graph.shape_of(value)
    height, width = (one + 2 * zeros - 1 for one in size)  # type: ignore[operator]
    dtype = str(graph.dtype_of(value)).removeprefix("torch.")
    window = {"kernel": TWICE, "stride": (1, 1), "padding": (zeros, zeros), "ceil_mode": False}
    sums = AvgPool2d.node(
        graph.fresh(f"{name}_sums"), {"x": value}, {**window, "count_padding": True, "divisor": 1},
        (first, second, height, width), dtype,
    )  # fmt: skip
    turned = _pytorchs("flip", graph.fresh(f"{name}_turned"), sums, (2, 3), sums.shape)
    swapped = _pytorchs("permute", name, turned, (1, 0, 2, 3), (second, first, height, width))
    for node in (sums, turned, swapped.with_attributes(layout="nhwc")):
        graph.nodes[node.name] = node


def _pytorchs(name: str, value: str, of: Node, dims: tuple[int, ...], shape: Shape) -> Node:
    """A call of one of PyTorch's operators over dimensions."""
    attributes = {"target": f"aten::{name}", "arguments": {"self": Reference("in0"), "dims": dims}}
    return Aten.node(value, {"in0": of.name}, attributes, shape, of.dtype)
