"""Absorption of channel shuffles into the weights of the layers that read them.

A convolution can read channels in any order, since its weights are reordered once. Channel-wise operators pass the
order on to their readers. So a value that only selects or permutes channels of another is not needed if all readers can
read the other one instead, with zero weights for unselected channels. Where a reader cannot, an interleaving of
channels is one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import with_channels
from escalade.engine.nodes.rearrange import Shuffle, shuffle_order
from escalade.engine.nodes.views import Concatenate, Permute, Reshape, Slice, concatenated_values
from escalade.engine.passes.channel_order import (
    Order,
    passing_channels,
    reading_channels,
    selected_channels,
    writing_channels,
)
from escalade.ops.base.dtypes import VECTOR_BYTES

# Largest ratio of padded to original channels. ShuffleNet's 58 channels of fp16 become 64: kernels with full vector
# accesses gain more than the additional bytes cost.
MAX_PADDING_FACTOR = 1.25


def recognize_shuffles(graph: Graph) -> None:
    """Recognize shuffles that the model writes as a view as groups, a transposition, and a view back."""
    for node in graph:
        transposed = graph.nodes.get(node.inputs["x"]) if Reshape.matches(node) else None
        groups = graph.nodes.get(transposed.inputs["x"]) if Permute.matches(transposed) else None
        if not Reshape.matches(groups) or transposed is None:
            continue
        if _is_shuffle(graph, groups, transposed, node):
            _, ways, step, *_ = groups.shape
            graph.nodes[node.name] = Shuffle.instead_of(node, {"x": groups.inputs["x"]}, ways=ways, step=step)
    graph.remove_dead_code()


def _is_shuffle(graph: Graph, groups: Node, transposed: Node, node: Node) -> bool:
    """Return True for views of [N, C, H, W] as [N, ways, step, H, W], with ways and step swapped, and back."""
    image = graph.shape_of(groups.inputs["x"])
    return (
        len(image) == 4
        and node.is_floating
        and node.shape == image
        and len(groups.shape) > 3
        and groups.shape[0] == image[0]
        and groups.shape[1] * groups.shape[2] == image[1]  # type: ignore[operator]
        and transposed.attributes["order"] == (0, 2, 1, *range(3, len(groups.shape)))
    )


def absorb_shuffles(graph: Graph, dtype: str) -> None:
    """Absorb shuffles into weights where possible, then pad channels to full vector accesses.

    Repeated halving leaves odd numbers of channels. So in networks with shuffles, operands of concatenations and
    results of layers get unused trailing channels, which makes every part start at an aligned channel.
    """
    if not any(map(Shuffle.matches, graph)):
        return
    vector_elements = VECTOR_BYTES // STORAGE[dtype].itemsize
    for node in graph:
        selection = _selection(graph, node)
        if selection is not None:
            _absorb(graph, node, selection)
    graph.remove_dead_code()
    for node in graph:
        _pad_concatenation(graph, node, vector_elements)
    for node in graph:
        _pad_layer(graph, node, vector_elements)
    graph.remove_dead_code()


@dataclass(frozen=True)
class _Selection:
    value: str
    order: Order

    def of(self, channels: _Selection) -> _Selection:
        """Compose with the selection that `value` itself is."""
        return _Selection(channels.value, tuple(channels.order[channel] for channel in self.order))


def _selection(graph: Graph, node: Node) -> _Selection | None:
    """Trace shuffles and slices back to the value that they select channels of; None without a shuffle."""
    selected = selected_channels(node)
    selection, shuffled = None, False
    while selected is not None:
        shuffled |= Shuffle.matches(node)
        own = _Selection(node.inputs["x"], selected)
        selection = own if selection is None else selection.of(own)
        before = graph.nodes.get(selection.value)
        if before is None:
            break
        node, selected = before, selected_channels(before)
    return selection if shuffled else None


def _width(graph: Graph, value: str) -> int:
    shape = graph.shape_of(value)
    channels = shape[1] if len(shape) == 4 else 0
    return channels if isinstance(channels, int) else 0


def _absorb(graph: Graph, node: Node, selection: _Selection) -> None:
    readers = [reader for reader in graph.users().get(node.name, []) if selected_channels(reader) is None]
    if node.name not in graph.outputs and _redirect_readers(graph, readers, node.name, selection):
        return
    channels = _width(graph, selection.value)
    producer = graph.nodes.get(selection.value)
    if producer is not None and graph.only_user(producer.name) is node and len(selection.order) == channels:
        written = writing_channels(producer, selection.order, graph)
        if written is not None:
            graph.nodes[producer.name] = written
            graph.remove(node, instead=producer.name)
            return
    graph.nodes[node.name] = _select(node, selection) or node
    _sink(graph, graph.nodes[node.name])


def _select(node: Node, selection: _Selection) -> Node | None:
    """Return a single slice or shuffle node for a selection; None if neither can represent it."""
    order, count = selection.order, len(selection.order)
    if order == tuple(range(order[0], order[0] + count)):
        return Slice.instead_of(node, {"x": selection.value}, dimension=1, first=order[0])
    step = order[1] - order[0]
    ways = next((way for way, channel in enumerate(order) if channel == order[0] + 1), count)
    if order[0] or step < 1 or order != shuffle_order(count, ways, step):
        return None
    return Shuffle.instead_of(node, {"x": selection.value}, ways=ways, step=step)


def _sink(graph: Graph, node: Node) -> None:
    """Move a shuffle past its only reader, if the reader's result is smaller."""
    reader = graph.only_user(node.name)
    if not Shuffle.matches(node) or reader is None:
        return
    channels = _width(graph, node.inputs["x"])
    order = selected_channels(node)
    if order is None or reader.inputs.get("x") != node.name or len(order) != channels:
        return
    if not _is_smaller(reader, node):
        return
    moved = passing_channels(reader, order, channels, graph)
    if moved is not None:
        moved = replace(moved.with_inputs(x=node.inputs["x"]), name=f"{reader.name}_unshuffled")
        first = graph.add(moved, before=reader.name)
        graph.nodes[reader.name] = Shuffle.instead_of(reader, {"x": first}, **node.attributes)
        del graph.nodes[node.name]


def _is_smaller(node: Node, other: Node) -> bool:
    sizes = zip(node.shape[2:], other.shape[2:], strict=True) if len(node.shape) == len(other.shape) else ()
    return any(own < given for own, given in sizes)  # type: ignore[operator]


def _redirect_readers(graph: Graph, readers: Iterable[Node], value: str, selection: _Selection) -> bool:
    """Let all readers read the selection's source; return False, without changes, if one cannot."""
    direct, rewrites = [reader.name for reader in readers], dict[str, Node]()
    if not _collect(graph, readers, value, selection.order, _width(graph, selection.value), rewrites):
        return False
    graph.nodes.update(rewrites)
    for name in direct:
        graph.nodes[name] = graph.nodes[name].with_inputs(x=selection.value)
    return True


def _collect(
    graph: Graph, readers: Iterable[Node], value: str, order: Order, channels: int, rewrites: dict[str, Node]
) -> bool:
    """Collect rewritten readers for a value with `channels` channels, of which `order` are its current ones.

    Readers that pass channels on are followed to their own readers. Return False if a reader cannot be rewritten.
    """
    for reader in readers:
        if reader.roles_of(value) != ["x"]:
            return False
        selected = selected_channels(reader)
        if selected is not None:
            rewrite = _select(reader, _Selection(value, tuple(order[channel] for channel in selected)))
        else:
            rewrite = reading_channels(reader, order, channels, graph)
        if rewrite is None:
            rewrite = passing_channels(reader, order, channels, graph)
            behind = graph.users().get(reader.name, [])
            if rewrite is None or reader.name in graph.outputs:
                return False
            if not _collect(graph, behind, reader.name, order, channels, rewrites):
                return False
        rewrites[reader.name] = rewrite
    return True


def _pad_concatenation(graph: Graph, node: Node, vector_elements: int) -> None:
    """Pad the operands of a concatenation, so that each starts at an aligned channel."""
    if not Concatenate.matches(node) or len(node.shape) != 4 or node.name in graph.outputs:
        return
    if node.attributes["dimension"] != 1:
        return
    parts, readers = concatenated_values(node), graph.users().get(node.name, [])
    widths = [_width(graph, part) for part in parts]
    if not any(width % vector_elements for width in widths):
        return
    padded = [_round_up(width, vector_elements) for width in widths]
    offsets = accumulate(padded, initial=0)
    starts = zip(offsets, widths, strict=False)
    order = tuple(start + channel for start, width in starts for channel in range(width))
    made = [_padded_producer(graph, part, node, width) for part, width in zip(parts, padded, strict=True)]
    rewrites: dict[str, Node] = {}
    if None in made or not _collect(graph, readers, node.name, order, sum(padded), rewrites):
        return
    graph.nodes.update({producer.name: producer for producer in made if producer is not None})
    graph.nodes.update(rewrites)
    graph.nodes[node.name] = with_channels(node, sum(padded))


def _pad_layer(graph: Graph, node: Node, vector_elements: int) -> None:
    """Pad the result of a layer to a multiple of a vector access, if its readers can ignore the padding."""
    width = _width(graph, node.name)
    padded = _round_up(width, vector_elements)
    if node.name in graph.outputs or not width < padded <= MAX_PADDING_FACTOR * width:
        return
    rewrites: dict[str, Node] = {}
    readers = graph.users().get(node.name, [])
    if not _collect(graph, readers, node.name, tuple(range(width)), padded, rewrites):
        return
    made = writing_channels(node, _filled(width, padded), graph)
    if made is not None:
        graph.nodes.update({**rewrites, made.name: made})


def _round_up(channels: int, vector_elements: int) -> int:
    return -(-channels // vector_elements) * vector_elements


def _filled(own: int, channels: int) -> tuple[int | None, ...]:
    """Return the order of all channels of a value followed by zero channels (None)."""
    return (*range(own), *[None] * (channels - own))


def _padded_producer(graph: Graph, value: str, concatenation: Node, channels: int) -> Node | None:
    """Return the producer of an operand with more channels; None if it cannot, or has other readers."""
    producer = graph.nodes.get(value)
    if producer is None or graph.only_user(value) is not concatenation:
        return None
    if Shuffle.matches(producer):
        more = with_channels(producer, channels)
        order = selected_channels(more)
        return more if order and max(order) < _width(graph, producer.inputs["x"]) else None
    return writing_channels(producer, _filled(_width(graph, value), channels), graph)
