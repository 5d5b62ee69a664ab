"""Training steps: fusion into the gradients of convolutions and max pools, and of upsampling into convolutions.

In an image upsampled by 2, a filter meets each pixel of the small image up to four times. So y = conv(nearest(x), w) is
the transposed convolution of x with stride 2 by flipped filters whose taps are sums of up to four taps of w. Its
gradients are a convolution with stride 2, and the gradient of that one's weights. For 3×3 filters that takes 16
products instead of 36, and the large image is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name
from escalade.engine.nodes.base import activation_of, with_activation
from escalade.engine.nodes.conv2d import (
    BIAS_DIMS,
    BIAS_GRADIENT,
    Conv2d,
    Conv2dInputGradient,
    Conv2dWeightGradient,
    ConvTranspose2d,
    bias_gradient,
    has_one_input,
)
from escalade.engine.nodes.conv3d import is_input_gradient, is_weight_gradient
from escalade.engine.nodes.pools import INDICES, MaxPool2d, MaxPool2dBackward
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import SideOutput, insert_side_output, side_outputs_of
from escalade.engine.nodes.signature import Attributes
from escalade.engine.nodes.upsample2d import FilterSums, Upsample2d, Upsample2dBackward
from escalade.engine.nodes.views import Reshape
from escalade.engine.passes.gradient_patterns import relu_backward_after, sort_nodes
from escalade.ops.expressions import Expression
from escalade.ops.max_pool2d import NOWHERE

_WINDOW = ("kernel", "stride", "padding", "ceil_mode", "dilation")


def mask_input_gradients(graph: Graph) -> None:
    """Fuse the backward pass of the ReLU before a convolution into the gradient of its input."""
    for node in graph:
        is_free = is_input_gradient(node) and not {"mask", "residual"} & node.inputs.keys()
        found = relu_backward_after(node, graph) if is_free else None
        if found is not None:
            relu, result = found
            graph.nodes[relu.name] = replace(node.with_inputs(mask=result), name=relu.name)
            del graph.nodes[node.name]


def fuse_bias_gradients(graph: Graph) -> None:
    """Fuse the gradient of a bias into that of the weight: the sum of the same gradient, which its kernels read."""
    changed = False
    for node in graph:
        if not is_weight_gradient(node) or node.attributes["bias"]:
            continue
        gradient = node.inputs["gradient"]
        sums = (
            other for other in _readers_of_views(graph, gradient) if _is_bias_gradient(other, node, graph)
        )
        bias = next(sums, None)
        if bias is None or bias.dtype != node.dtype:
            continue
        fused = node.with_attributes(bias=True)
        insert_side_output(
            graph, fused, SideOutput.of(fused, bias.name, BIAS_GRADIENT, bias.shape, bias.dtype)
        )
        changed = True
    if changed:
        sort_nodes(graph)


def _readers_of_views(graph: Graph, name: str) -> list[Node]:
    """Return the nodes that read a value, or anything that it is a reshape of, or a reshape of the same value."""
    while Reshape.matches(node := graph.nodes.get(name)) and "order" not in node.attributes:
        name = node.inputs["x"]
    readers = graph.readers(name)
    for reader in readers:
        if Reshape.matches(reader) and "order" not in reader.attributes:
            readers += graph.readers(reader.name)
    return readers


def _is_bias_gradient(node: Node, layer: Node, graph: Graph) -> bool:
    """Return True for the sum of a layer's gradient over all dimensions but its channels, as an image or as rows."""
    if not Reduce.matches(node) or "before" in node.attributes or not activation_of(node).is_identity:
        return False
    gradient, a, sizes = layer.inputs["gradient"], node.attributes, graph.shape_of(node.inputs["x"])
    if node.inputs["x"] == gradient:
        return (a["kind"], a["dims"]) == ("sum", BIAS_DIMS)
    is_of_rows = graph.shape_of(gradient) == (*graph.shape_of(gradient)[:1], *sizes[-1:], 1, 1)
    return is_of_rows and (a["kind"], a["dims"]) == ("sum", tuple(range(len(sizes) - 1)))


def fuse_max_pool_gradients(graph: Graph) -> None:
    """Fuse the backward pass of the ReLU before a max pool, and let the pool itself write its argmax indices."""
    for node in graph:
        if not MaxPool2dBackward.matches(node) or INDICES in node.inputs:
            continue
        found = relu_backward_after(node, graph)
        relu = found[0] if found is not None and found[1] == node.inputs["x"] else None
        fused = node.with_attributes(mask=relu is not None)
        pool = next((other for other in graph if _is_forward_of(other, node)), None)
        if pool is not None:
            indices = _write_indices(graph, pool, behind_relu=relu is not None)
            fused = fused.with_inputs(x=None, places=indices).with_attributes(mask=False)
        if relu is not None:
            graph.nodes[relu.name] = replace(fused, name=relu.name)
            del graph.nodes[node.name]
        else:
            graph.nodes[node.name] = fused


def _is_forward_of(pool: Node, backward: Node) -> bool:
    """Return True if a node is the pool whose gradient `backward` is, and can write its argmax indices."""
    if not MaxPool2d.matches(pool) or pool.inputs["x"] != backward.inputs["x"] or INDICES in pool.attributes:
        return False
    a, b = pool.attributes, backward.attributes
    height, width = a["kernel"]
    return height * width <= NOWHERE and all(a[key] == b[key] for key in _WINDOW)  # indices are uint8


def _write_indices(graph: Graph, pool: Node, *, behind_relu: bool) -> str:
    """Let a pool write its argmax indices; return their name."""
    fused = pool.with_attributes(**{INDICES: True, "behind_relu": behind_relu})
    indices = SideOutput.of(fused, graph.fresh(f"{pool.name}_{INDICES}"), INDICES, pool.shape, "uint8")
    insert_side_output(graph, fused, indices)
    return indices.name


_STRIDE = (2, 2)
_RELU_BACKWARD = Expression.parse("where(residual <= 0, 0, x)")
"""Backward pass of a ReLU whose result is the residual."""


def fuse_upsampling(graph: Graph) -> None:
    """Fuse upsampling into the convolutions that read it, and into the gradients of their weights."""
    for node in graph:
        if not Upsample2d.matches(node) or not _doubles(node.attributes, graph.shape_of(node.inputs["x"])):
            continue
        readers = [one for one in graph if node.name in one.inputs.values() and not SideOutput.matches(one)]
        if node.name in graph.outputs or not all(_can_read_small(one, node, graph) for one in readers):
            continue
        for reader in readers:
            if Conv2d.matches(reader):
                graph.nodes[reader.name] = _small_convolution(reader, node.inputs["x"], graph)
            else:
                _replace_weight_gradient(reader, node.inputs["x"], graph)
        del graph.nodes[node.name]
        sort_nodes(graph)


def fuse_upsampling_gradients(graph: Graph) -> None:
    """Replace the gradient of a convolution's input, that of upsampling and a ReLU backward by one convolution."""
    for node in graph:
        large = graph.nodes.get(node.inputs["gradient"]) if Upsample2dBackward.matches(node) else None
        if not Conv2dInputGradient.matches(large) or graph.only_user(large.name) is not node:
            continue
        weight = large.inputs["weight"]
        filters = graph.shape_of(weight)
        if not _doubles(node.attributes, node.shape) or not _is_dense(large, filters):
            continue
        if weight in graph.constants or "mask" in large.inputs:
            continue
        found = relu_backward_after(node, graph)
        last, mask = found if found is not None else (node, None)
        small = Conv2d.instead_of(
            replace(last, source=node.source),
            {"x": large.inputs["gradient"], "weight": _summed_filters(weight, graph), "residual": mask},
            stride=_STRIDE, padding=_flipped_padding(large, filters), dilation=(1, 1), groups=1, relu=False,
        )  # fmt: skip
        graph.nodes[last.name] = with_activation(small, _RELU_BACKWARD) if mask else small
        for name in {large.name, node.name} - {last.name}:
            del graph.nodes[name]
        sort_nodes(graph)


def _doubles(attributes: Attributes, small: Shape) -> bool:
    """Return True if an upsampling, or its gradient, repeats each pixel of an image of this shape 2×2 times."""
    sizes = zip(attributes["output"], attributes["factors"], small[2:], strict=True)
    return attributes["mode"] == "nearest" and all(
        isinstance(size, int) and output == 2 * size and factor in (0.0, 2.0)
        for output, factor, size in sizes
    )


def _is_dense(layer: Node, filters: Shape) -> bool:
    """Return True for a convolution, or a gradient of one, with filters larger than 1 and no stride or gaps."""
    a = layer.attributes
    return (a["stride"], a["dilation"], a["groups"]) == ((1, 1), (1, 1), 1) and all(
        isinstance(size, int) and padding < size and size > 1
        for size, padding in zip(filters[2:], a["padding"], strict=True)
    )


def _can_read_small(reader: Node, upsampling: Node, graph: Graph) -> bool:
    """Return True for a dense convolution whose weights are trained, and for the gradient of such weights."""
    if reader.roles_of(upsampling.name) != ["x"]:
        return False
    if Conv2dWeightGradient.matches(reader):
        return _is_dense(reader, reader.shape)
    weight = reader.inputs.get("weight", "")
    return (
        Conv2d.matches(reader)
        and weight not in graph.constants
        and has_one_input(reader)
        and _is_dense(reader, graph.shape_of(weight))
    )


def _flipped_padding(layer: Node, filters: Shape) -> tuple[int, int]:
    """Return the padding of the transposed convolution with flipped filters."""
    padding: Sequence[int] = layer.attributes["padding"]
    rows, columns = (size - 1 - own for size, own in zip(filters[2:], padding, strict=True))  # type: ignore[operator]
    return rows, columns


def _small_convolution(layer: Node, x: str, graph: Graph) -> Node:
    weight = layer.inputs["weight"]
    small = ConvTranspose2d.instead_of(
        layer, {"gradient": x, "weight": _summed_filters(weight, graph), "bias": layer.inputs.get("bias")},
        stride=_STRIDE, padding=_flipped_padding(layer, graph.shape_of(weight)), output_padding=(0, 0),
        dilation=(1, 1), groups=1, relu=False,
    )  # fmt: skip
    return with_activation(small, activation_of(layer))


def _replace_weight_gradient(layer: Node, x: str, graph: Graph) -> None:
    """Compute the gradient of filters from that of the summed filters."""
    gradient = layer.inputs["gradient"]
    for side_output in side_outputs_of(layer, graph):
        graph.nodes[side_output.name] = bias_gradient(side_output, gradient)
    filters, channels, height, width = layer.shape
    small = Conv2dWeightGradient.node(
        f"{layer.name}_summed", {"x": gradient, "gradient": x},
        {"stride": _STRIDE, "padding": _flipped_padding(layer, layer.shape), "dilation": (1, 1), "groups": 1,
         "bias": False},
        (channels, filters, height + 1, width + 1), layer.dtype,  # type: ignore[operator]
    )  # fmt: skip
    summed = _filter_sums(graph.add(small), layer.name, graph, zeros=False)
    graph.nodes[layer.name] = replace(summed, source=layer.source)


def _summed_filters(weight: str, graph: Graph) -> str:
    """Return flipped filters with sums of up to four taps, input and output channels swapped; created once."""
    name = f"{weight}_summed"
    if name not in graph.nodes:
        graph.append(_filter_sums(weight, name, graph, zeros=True))
    return name


def _filter_sums(value: str, name: str, graph: Graph, *, zeros: bool) -> Node:
    first, second, *size = graph.shape_of(value)
    height, width = (one + 2 * zeros - 1 for one in size)  # type: ignore[operator]
    shape = (second, first, height, width)
    return FilterSums.node(name, {"x": value}, {"zeros": zeros}, shape, dtype_name(graph.dtype_of(value)))
