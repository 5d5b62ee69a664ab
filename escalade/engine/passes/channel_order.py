"""Rules for channels in another order: how a node selects, reads, passes on or writes some channels of an image.

An order lists, for each channel that a reader sees, its index among the channels that are stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import activation_of, with_channels
from escalade.engine.nodes.batch_norm import STATISTICS, BatchNorm
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.elementwise import Relu
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.pools import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from escalade.engine.nodes.rearrange import Pad2d, Shuffle, shuffle_order
from escalade.engine.nodes.upsample2d import Upsample2d
from escalade.engine.nodes.views import Reshape, Slice

Order = tuple[int, ...]
MAX_CHANNELS = 2**16
# Channels that a convolution may read, per channel that it needs, with zero weights for the others. A 1×1 convolution
# is bound by its bytes, larger filters by their products.
MAX_READ_FACTOR, MAX_READ_FACTOR_1X1 = 1.25, 2.0
_CHANNELWISE = (MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, Upsample2d, Pad2d, Relu)


def selected_channels(node: Node) -> Order | None:
    """Return the channels of x that a node selects if it does nothing else; None beyond MAX_CHANNELS."""
    channels = node.shape[1] if len(node.shape) == 4 else None
    if not isinstance(channels, int) or channels > MAX_CHANNELS:
        return None
    a = node.attributes
    if Shuffle.matches(node):
        return shuffle_order(channels, a["ways"], a["step"])
    if Slice.matches(node) and a["dimension"] == 1:
        return tuple(range(a["first"], a["first"] + channels))
    return None


def reading_channels(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    """Return the node with weights for an x of `channels` channels, of which `order` are its current ones."""
    if Linear.matches(node):
        return _linear_reading(node, order, channels, graph)
    return _convolution_reading(node, order, channels, graph) if Conv2d.matches(node) else None


def _linear_reading(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    if len(graph.shape_of(node.inputs["x"])) != 2:
        return None
    weight = _scattered(graph.constants[node.inputs["weight"]], 1, order, channels)
    return node.with_inputs(weight=graph.add_constant(f"{node.name}_weight", weight))


def _convolution_reading(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    weight, groups = graph.constants[node.inputs["weight"]], node.attributes["groups"]
    width = weight.shape[1]
    if groups > 1:
        stays_in_group = all(stored // width == own // width for own, stored in enumerate(order))
        if not _is_permutation(order, channels) or not stays_in_group:
            return None
        starts = range(0, channels, width)
        orders = [torch.tensor(order[start : start + width]) - start for start in starts]
        parts = zip(weight.chunk(groups), orders, strict=True)
        read = torch.cat([torch.empty_like(part).index_copy(1, where, part) for part, where in parts])
    else:
        most = MAX_READ_FACTOR_1X1 if tuple(weight.shape[2:]) == (1, 1) else MAX_READ_FACTOR
        if channels > most * len(order):
            return None
        read = _scattered(weight, 1, order, channels)
    return node.with_inputs(weight=graph.add_constant(f"{node.name}_weight", read))


def passing_channels(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    """Return the node applied to all `channels` stored channels, in stored order; None unless it is per channel."""
    if any(kind.matches(node) for kind in _CHANNELWISE):
        return with_channels(node, channels)
    if Conv2d.matches(node):
        return _depthwise_passing(node, order, channels, graph)
    if BatchNorm.matches(node):
        if len(node.shape) != 4 or "residual" in node.inputs or not _is_permutation(order, channels):
            return None
        return _with_scattered(node, STATISTICS, order, channels, graph)
    if Pointwise.matches(node):
        return _pointwise_passing(node, order, channels, graph)
    if Reshape.matches(node):  # the channels of an image of one pixel are features
        image = graph.shape_of(node.inputs["x"])
        is_flattened = len(image) == 4 and image[2:] == (1, 1) and node.shape == image[:2]
        return with_channels(node, channels) if is_flattened else None
    return None


def _depthwise_passing(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    weight = graph.constants[node.inputs["weight"]]
    if not len(order) == node.attributes["groups"] == weight.shape[0] or not has_one_input(node):
        return None
    if channels > len(order) and not _is_finite_for_zeros(node):
        return None
    scattered = _with_scattered(node, ("weight", "bias"), order, channels, graph)
    return scattered.with_attributes(groups=channels)


def _pointwise_passing(node: Node, order: Order, channels: int, graph: Graph) -> Node | None:
    """Rewrite a function of one image and of constants per channel."""
    values = [name for name in node.inputs.values() if name not in graph.constants]
    if len(node.shape) != 4 or len(values) != 1 or not _is_permutation(order, channels):
        return None
    if graph.shape_of(values[0]) != node.shape:
        return None
    moved = {}
    for role, name in node.inputs.items():
        tensor = graph.constants.get(name)
        if tensor is not None and tensor.dim() >= 3 and tensor.shape[-3] > 1:
            moved[role] = _scattered(tensor, tensor.dim() - 3, order, channels)
    return with_channels(node, channels).with_inputs(**graph.add_constants(node.name, moved))


def writing_channels(node: Node, order: tuple[int | None, ...], graph: Graph) -> Node | None:
    """Return the convolution that writes its channels in this order, and zeros for None."""
    if not Conv2d.matches(node) or node.attributes["groups"] != 1 or not has_one_input(node):
        return None
    if None in order and not _is_finite_for_zeros(node):
        return None
    kept = [(index, channel) for index, channel in enumerate(order) if channel is not None]
    indices, channels = tuple(index for index, _ in kept), torch.tensor([channel for _, channel in kept])
    roles = [role for role in ("weight", "bias") if role in node.inputs]
    constants = {
        role: _scattered(graph.constants[node.inputs[role]][channels], 0, indices, len(order))
        for role in roles
    }
    return with_channels(node, len(order)).with_inputs(**graph.add_constants(node.name, constants))


def _with_scattered(node: Node, roles: Iterable[str], order: Order, channels: int, graph: Graph) -> Node:
    """Return the node for `channels` channels, with its constants at the indices `order` and zeros elsewhere."""
    constants = {
        role: _scattered(graph.constants[node.inputs[role]], 0, order, channels)
        for role in roles
        if role in node.inputs
    }
    return with_channels(node, channels).with_inputs(**graph.add_constants(node.name, constants))


def _is_finite_for_zeros(node: Node) -> bool:
    """Return True if zero filters give finite numbers, which readers may multiply by zero."""
    (value,) = activation_of(node).evaluate({"x": torch.zeros(1)})
    return bool(value.isfinite().all())


def _scattered(tensor: torch.Tensor, axis: int, order: Order, size: int) -> torch.Tensor:
    """Return a tensor of `size` zeros along an axis, with the given one's elements at the indices `order`."""
    shape = list(tensor.shape)
    shape[axis] = size
    return tensor.new_full(shape, 0.0).index_copy(axis, torch.tensor(order), tensor)


def _is_permutation(order: Order, channels: int) -> bool:
    return sorted(order) == [*range(channels)]
