"""What a model writes into a part of a value: that part in its place, and of the rest nothing is copied.

`y = x[:, :16]; y += z` is captured as a sum, then as x with the sum written over its first channels, then as those
channels read again. Whoever reads what was written reads the sum, whoever reads beside it reads x; for whoever reads
both they lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.concatenate import Concatenate
from escalade.engine.nodes.slice import Slice


@dataclass(frozen=True)
class _Written:
    """A range of a value's dimension, and what is written there."""

    value: str
    source: str
    dimension: int
    first: int
    end: int


def resolve_scatters(graph: Graph) -> None:
    """Parts of values are written where they are read."""
    for node in graph:
        written = _written(graph, node)
        if written is not None and graph.shape_of(written.source) == node.shape:
            graph.remove(node, instead=written.source)
    for name in reversed(tuple(graph.nodes)):  # what was written over is read no more when its turn comes
        written = _written(graph, graph.nodes[name]) if name in graph.nodes else None
        if written is None:
            continue
        for reader in graph.users().get(name, []):
            _read_elsewhere(graph, reader, written)
        if graph.users().get(name) or name in graph.outputs:
            _join(graph, graph.nodes[name], written)
        else:
            del graph.nodes[name]


def _written(graph: Graph, node: Node) -> _Written | None:
    """What a node writes into a copy of a value, if it is a range of numbers one after the other."""
    if not Aten.matches(node) or not node.is_floating:
        return None
    if name_of(node.attributes["target"]) != "slice_scatter":
        return None
    call = AtenCall(node)
    value, source, at = call.value("self"), call.value("src"), call("dim", 0)
    if value is None or source is None or call("step", 1) != 1 or not isinstance(at, int):
        return None
    at %= len(node.shape)
    whole, own, start = node.shape[at], graph.shape_of(source)[at], call("start", 0)
    if graph.shape_of(source) == node.shape:
        return _Written(value, source, at, 0, 0)
    if not (isinstance(whole, int) and isinstance(own, int) and isinstance(start, int)):
        return None  # a range of the batch
    if {value, source} & graph.constants.keys():
        return None
    first = min(max(start + whole if start < 0 else start, 0), whole)
    return _Written(value, source, at, first, first + own)


def _read_elsewhere(graph: Graph, reader: Node, written: _Written) -> None:
    """A range that is written, or not, as a whole is read where it comes from."""
    if not Slice.matches(reader) or reader.attributes["dimension"] != written.dimension:
        return
    first, own = reader.attributes["first"], reader.shape[written.dimension]
    assert isinstance(own, int)
    if first >= written.end or first + own <= written.first:
        graph.nodes[reader.name] = reader.with_inputs(x=written.value)
    elif written.first <= first and first + own <= written.end:
        if reader.shape == graph.shape_of(written.source):
            graph.remove(reader, instead=written.source)
        else:
            inside = reader.with_attributes(first=first - written.first)
            graph.nodes[reader.name] = inside.with_inputs(x=written.source)


def _join(graph: Graph, node: Node, written: _Written) -> None:
    """What is written between what is left of the value in front of it and behind it."""
    at = written.dimension
    whole = node.shape[at]
    assert isinstance(whole, int)
    parts = []
    for first, end in ((0, written.first), (written.first, written.end), (written.end, whole)):
        if first == written.first and end == written.end:
            parts.append(written.source)
        elif end > first:
            shape = (*node.shape[:at], end - first, *node.shape[at + 1 :])
            name = graph.fresh(f"{node.name}_rest")
            attributes = {"dimension": at, "first": first}
            graph.insert_before(
                node.name, Slice.node(name, {"x": written.value}, attributes, shape, node.dtype)
            )
            parts.append(name)
    inputs: dict[str, str | None] = {f"x{number}": part for number, part in enumerate(parts)}
    graph.nodes[node.name] = Concatenate.instead_of(node, inputs, dimension=at)
