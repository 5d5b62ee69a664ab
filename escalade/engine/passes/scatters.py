"""Removal of `slice_scatter`, which functionalized in-place writes to a slice leave behind.

`y = x[:, :16]; y += z` is captured as a sum, a copy of x with the sum scattered over its first channels, and a slice of
that copy. A read within the written range reads the sum instead, a read outside of it reads x, and a read of both reads
a concatenation.
"""

from __future__ import annotations

from dataclasses import dataclass

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import AtenCall, name_of
from escalade.engine.nodes.views import Concatenate, Slice


@dataclass(frozen=True)
class _SliceWrite:
    """A range in one dimension of `value` that `source` is written to."""

    value: str
    source: str
    dimension: int
    first: int
    end: int


def resolve_scatters(graph: Graph) -> None:
    """Replace slice scatters by reads of their sources, or by concatenations."""
    for node in graph:
        write = _slice_write(graph, node)
        if write is not None and graph.shape_of(write.source) == node.shape:
            graph.remove(node, instead=write.source)
    for name in reversed(
        tuple(graph.nodes)
    ):  # last first: a later write may remove all reads of an earlier one
        write = _slice_write(graph, graph.nodes[name]) if name in graph.nodes else None
        if write is None:
            continue
        for reader in graph.users().get(name, []):
            _redirect_read(graph, reader, write)
        if graph.users().get(name) or name in graph.outputs:
            _to_concatenation(graph, graph.nodes[name], write)
        else:
            del graph.nodes[name]


def _slice_write(graph: Graph, node: Node) -> _SliceWrite | None:
    """Return the write of a contiguous range that a node makes to a copy of a value."""
    if not Aten.matches(node) or not node.is_floating:
        return None
    if name_of(node.attributes["target"]) != "slice_scatter":
        return None
    call = AtenCall(node)
    value, source, dimension = call.value("self"), call.value("src"), call("dim", 0)
    if value is None or source is None or call("step", 1) != 1 or not isinstance(dimension, int):
        return None
    dimension %= len(node.shape)
    size, length, start = node.shape[dimension], graph.shape_of(source)[dimension], call("start", 0)
    if graph.shape_of(source) == node.shape:
        return _SliceWrite(value, source, dimension, 0, 0)
    if not (isinstance(size, int) and isinstance(length, int) and isinstance(start, int)):
        return None  # a range of the batch
    if {value, source} & graph.constants.keys():
        return None
    first = min(max(start + size if start < 0 else start, 0), size)
    return _SliceWrite(value, source, dimension, first, first + length)


def _redirect_read(graph: Graph, reader: Node, write: _SliceWrite) -> None:
    """Redirect a slice that lies within the written range, or outside of it, to the value that it comes from."""
    if not Slice.matches(reader) or reader.attributes["dimension"] != write.dimension:
        return
    first, length = reader.attributes["first"], reader.shape[write.dimension]
    assert isinstance(length, int)
    if first >= write.end or first + length <= write.first:
        graph.nodes[reader.name] = reader.with_inputs(x=write.value)
    elif write.first <= first and first + length <= write.end:
        if reader.shape == graph.shape_of(write.source):
            graph.remove(reader, instead=write.source)
        else:
            inside = reader.with_attributes(first=first - write.first)
            graph.nodes[reader.name] = inside.with_inputs(x=write.source)


def _to_concatenation(graph: Graph, node: Node, write: _SliceWrite) -> None:
    """Replace the write by a concatenation of what is left of the value and the source."""
    dimension = write.dimension
    size = node.shape[dimension]
    assert isinstance(size, int)
    parts = []
    for first, end in ((0, write.first), (write.first, write.end), (write.end, size)):
        if first == write.first and end == write.end:
            parts.append(write.source)
        elif end > first:
            shape = (*node.shape[:dimension], end - first, *node.shape[dimension + 1 :])
            name = graph.fresh(f"{node.name}_rest")
            attributes = {"dimension": dimension, "first": first}
            rest = Slice.node(name, {"x": write.value}, attributes, shape, node.dtype)
            graph.insert_before(node.name, rest)
            parts.append(name)
    inputs: dict[str, str | None] = {f"x{number}": part for number, part in enumerate(parts)}
    graph.nodes[node.name] = Concatenate.instead_of(node, inputs, dimension=dimension)
