"""Convolutions of images whose pixels were repeated, by filters that are summed up beforehand.

A filter over an image of twice the size, each pixel of which is there four times, meets pixels of the small image in
sums of its own: y = conv(nearest(x), w) is the transposed convolution of x with stride 2 by w turned around, each pixel
of it a sum of up to four. Its gradients are a convolution with stride 2 and the gradient of that one's weights. For
3x3 filters that is 16 products instead of 36, and the large image is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Sequence

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.filter_sums import FilterSums
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
        graph.append(_sums(weight, name, graph, zeros=True))
    return name


def unsummed(gradient: Node, name: str, graph: Graph) -> Node:
    """The gradient of filters, of that of what they are summed up to."""
    graph.append(gradient)
    return _sums(gradient.name, name, graph, zeros=False)


def _sums(value: str, name: str, graph: Graph, *, zeros: bool) -> Node:
    first, second, *size = graph.shape_of(value)
    height, width = (one + 2 * zeros - 1 for one in size)  # type: ignore[operator]
    dtype = str(graph.dtype_of(value)).removeprefix("torch.")
    return FilterSums.node(name, {"x": value}, {"zeros": zeros}, (second, first, height, width), dtype)
