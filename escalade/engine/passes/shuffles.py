"""Channels in another order: most of it is left to the weights of whoever reads them.

A convolution takes channels in any order, since its weights are reordered once; so does what does one thing with every
channel, and gives its own in that order. So a value that is nothing but channels of another need not be there if all
of its readers can take the other instead, also as some of its channels, with weights of zero for the rest. Where one
cannot, channels dealt out in turns are one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import with_channels
from escalade.engine.nodes.shuffle import Shuffle, dealt
from escalade.engine.nodes.slice import Slice
from escalade.ops.base.dtypes import VECTOR_BYTES

Order = tuple[int, ...]
MOST_CHANNELS = 2**16
MOST_PADDED = 1.25
"""How many times the channels of a layer it may have with those that fill up an access. 58 of fp16, half of what
ShuffleNet has, are 64 with them, and kernels for whole accesses gain more than the bytes cost."""


def recognise_shuffles(graph: Graph) -> None:
    """What the model writes as views and their transposition."""
    Shuffle().fuse_written_out(graph)


def absorb_shuffles(graph: Graph, dtype: str) -> None:
    """Leaves the order of channels to weights, wherever that can be.

    Halves of halves are odd numbers of channels: where there were shuffles, what is joined and what layers make gets
    channels behind its own that nobody reads, until all begin where wide accesses may.
    """
    if not any(map(Shuffle.matches, graph)):
        return
    multiple = VECTOR_BYTES // STORAGE[dtype].itemsize
    for node in graph:
        found = _channels_of(graph, node)
        if found is not None:
            _absorb_one(graph, node, found)
    graph.remove_dead_code()
    for node in graph:
        _pad_joined(graph, node, multiple)
    for node in graph:
        _pad_made(graph, node, multiple)
    graph.remove_dead_code()


@dataclass(frozen=True)
class _Channels:
    """Channels of a value, in some order."""

    value: str
    order: Order

    def of(self, channels: _Channels) -> _Channels:
        """These channels of what is itself channels of another value."""
        return _Channels(channels.value, tuple(channels.order[channel] for channel in self.order))


def _channels_of(graph: Graph, node: Node) -> _Channels | None:
    """What a shuffle, or a part of one, is of a value that is neither; None of any other node."""
    taken = _taken(node)
    found, shuffled = None, False
    while taken is not None:
        shuffled |= Shuffle.matches(node)
        own = _Channels(node.inputs["x"], taken)
        found = own if found is None else found.of(own)
        before = graph.nodes.get(found.value)
        if before is None:
            break
        node, taken = before, _taken(before)
    return found if shuffled else None


def _taken(node: Node) -> Order | None:
    """The channels that a node takes of x, if it does nothing else; None for more than anybody lists."""
    if len(node.shape) != 4 or not isinstance(node.shape[1], int) or node.shape[1] > MOST_CHANNELS:
        return None
    return operator_of(node).channels_taken(node)


def _width(graph: Graph, value: str) -> int:
    shape = graph.shape_of(value)
    channels = shape[1] if len(shape) == 4 else 0
    return channels if isinstance(channels, int) else 0


def _absorb_one(graph: Graph, node: Node, found: _Channels) -> None:
    readers = [reader for reader in graph.users().get(node.name, []) if _taken(reader) is None]
    if node.name not in graph.outputs and _all_read(graph, readers, node.name, found):
        return
    channels = _width(graph, found.value)
    maker = graph.nodes.get(found.value)
    if maker is not None and graph.only_user(maker.name) is node and len(found.order) == channels:
        written = operator_of(maker).writing_channels(maker, found.order, graph)
        if written is not None:
            graph.nodes[maker.name] = written
            graph.remove(node, instead=maker.name)
            return
    graph.nodes[node.name] = _taking(node, found) or node
    _sink(graph, graph.nodes[node.name])


def _taking(node: Node, found: _Channels) -> Node | None:
    """One node that takes channels of a value, if there is one that does."""
    count = len(found.order)
    if found.order == tuple(range(found.order[0], found.order[0] + count)):
        return Slice.instead_of(node, {"x": found.value}, dimension=1, first=found.order[0])
    step = found.order[1] - found.order[0]
    ways = next((way for way, channel in enumerate(found.order) if channel == found.order[0] + 1), count)
    if found.order[0] or step < 1 or found.order != dealt(count, ways, step):
        return None
    return Shuffle.instead_of(node, {"x": found.value}, ways=ways, step=step)


def _sink(graph: Graph, node: Node) -> None:
    """Behind the one reader, if fewer elements are to be moved there."""
    reader = graph.only_user(node.name)
    if not Shuffle.matches(node) or reader is None:
        return
    channels = _width(graph, node.inputs["x"])
    order = _taken(node)
    if order is None or reader.inputs.get("x") != node.name or len(order) != channels:
        return
    if not _is_smaller(reader, node):
        return
    moved = operator_of(reader).before_channels(reader, order, channels, graph)
    if moved is not None:
        first = replace(moved, name=graph.fresh(f"{reader.name}_unshuffled"))
        graph.insert_before(reader.name, first.with_inputs(x=node.inputs["x"]))
        graph.nodes[reader.name] = Shuffle.instead_of(reader, {"x": first.name}, **node.attributes)
        del graph.nodes[node.name]


def _is_smaller(node: Node, other: Node) -> bool:
    sizes = zip(node.shape[2:], other.shape[2:], strict=True) if len(node.shape) == len(other.shape) else ()
    return any(own < given for own, given in sizes)  # type: ignore[operator]


def _all_read(graph: Graph, readers: Iterable[Node], value: str, found: _Channels) -> bool:
    """Makes these readers of a value read what it is channels of; says whether they can, and changes none if not."""
    direct, changed = [reader.name for reader in readers], dict[str, Node]()
    if not _collect(graph, readers, value, found.order, _width(graph, found.value), changed):
        return False
    graph.nodes.update(changed)
    for name in direct:
        graph.nodes[name] = graph.nodes[name].with_inputs(x=found.value)
    return True


def _collect(
    graph: Graph, readers: Iterable[Node], value: str, order: Order, channels: int, changed: dict[str, Node]
) -> bool:
    """Collects readers of a value as they are once it has so many channels, of which `order` are those that it has now;
    and whoever reads those whose results then have other channels. Says whether all can."""
    for reader in readers:
        if [role for role, name in reader.inputs.items() if name == value] != ["x"]:
            return False
        operator = operator_of(reader)
        taken = _taken(reader)
        if taken is not None:
            read = _taking(reader, _Channels(value, tuple(order[channel] for channel in taken)))
        else:
            read = operator.reading_channels(reader, order, channels, graph)
        if read is None:
            read = operator.before_channels(reader, order, channels, graph)
            behind = graph.users().get(reader.name, [])
            if read is None or reader.name in graph.outputs:
                return False
            if not _collect(graph, behind, reader.name, order, channels, changed):
                return False
        changed[reader.name] = read
    return True


def _pad_joined(graph: Graph, node: Node, multiple: int) -> None:
    """What is joined begins where wide accesses may, with channels that nobody reads between."""
    joined = operator_of(node).concatenated(node)
    if joined is None or joined.dimension != 1 or len(node.shape) != 4 or node.name in graph.outputs:
        return
    parts, readers = [node.inputs[role] for role in joined.roles], graph.users().get(node.name, [])
    widths = [_width(graph, part) for part in parts]
    if not any(width % multiple for width in widths):
        return
    padded = [_up(width, multiple) for width in widths]
    firsts = accumulate(padded, initial=0)
    order = tuple(
        first + channel for first, width in zip(firsts, widths, strict=False) for channel in range(width)
    )
    made = [_padded(graph, part, node, width) for part, width in zip(parts, padded, strict=True)]
    changed: dict[str, Node] = {}
    if None in made or not _collect(graph, readers, node.name, order, sum(padded), changed):
        return
    graph.nodes.update({maker.name: maker for maker in made if maker is not None})
    graph.nodes.update(changed)
    graph.nodes[node.name] = with_channels(node, sum(padded))


def _pad_made(graph: Graph, node: Node, multiple: int) -> None:
    """What a layer makes for those that can take more channels has a multiple of what one access takes."""
    width = _width(graph, node.name)
    padded = _up(width, multiple)
    if node.name in graph.outputs or not width < padded <= MOST_PADDED * width:
        return
    changed: dict[str, Node] = {}
    readers = graph.users().get(node.name, [])
    if not _collect(graph, readers, node.name, tuple(range(width)), padded, changed):
        return
    made = operator_of(node).writing_channels(node, _filled(width, padded), graph)
    if made is not None:
        graph.nodes.update({**changed, made.name: made})


def _up(channels: int, multiple: int) -> int:
    return -(-channels // multiple) * multiple


def _filled(own: int, channels: int) -> tuple[int | None, ...]:
    """All channels of a value, and zeros behind them."""
    return (*range(own), *[None] * (channels - own))


def _padded(graph: Graph, value: str, joint: Node, channels: int) -> Node | None:
    """Who makes a value that only one node joins, with more channels behind its own; None: that cannot be."""
    maker = graph.nodes.get(value)
    if maker is None or graph.only_user(value) is not joint:
        return None
    if Shuffle.matches(maker):
        more = with_channels(maker, channels)
        return more if max(Shuffle().channels_taken(more)) < _width(graph, maker.inputs["x"]) else None
    return operator_of(maker).writing_channels(maker, _filled(_width(graph, value), channels), graph)
