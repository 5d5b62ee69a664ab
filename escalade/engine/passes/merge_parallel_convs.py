"""Layers that read the same image as one: it is read once, and one launch has what it takes to fill a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.slice import Slice
from escalade.engine.passes.estimates import Estimates
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import VECTOR_BYTES


def join_siblings(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Convolutions that differ in their filters alone become one with the filters of all, whose readers take their part
    of its channels, where by the estimates that is sooner done. What is a part of something larger stays by itself:
    it cannot be a part of two."""
    for siblings in _families(graph):
        joined = operator_of(siblings[0]).side_by_side(siblings, graph)
        if joined is None:
            continue
        joined = replace(joined, name=graph.fresh(f"{siblings[0].name}_joined"))
        if not _pays(siblings, joined, graph, dtype, estimates):
            continue
        graph.insert_before(siblings[0].name, joined)
        first = 0
        for node in siblings:
            graph.nodes[node.name] = Slice.instead_of(node, {"x": joined.name}, dimension=1, first=first)
            first += _channels(node)


def _families(graph: Graph) -> list[list[Node]]:
    """Layers that read one value, do the same with it, and are read by layers alone that can take a part of theirs."""
    users = graph.users()
    found: dict[tuple[object, ...], list[Node]] = {}
    for node in graph:
        readers = users.get(node.name, [])
        if len(node.shape) != 4 or node.name in graph.outputs or not readers:
            continue
        if any(
            operator_of(reader).concatenated(reader) or operator_of(reader).taken(reader)
            for reader in readers
        ):
            continue
        alike = (
            operator_of(node),
            node.inputs.get("x"),
            repr(sorted(node.attributes.items())),
            tuple(node.inputs),
            node.shape[2:],
        )
        found.setdefault(alike, []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _channels(node: Node) -> int:
    channels = node.shape[1]
    assert isinstance(channels, int)
    return channels


def _pays(siblings: Sequence[Node], joined: Node, graph: Graph, dtype: str, estimates: Estimates) -> bool:
    """Whether one layer takes less time than several, also with readers whose pixels lie apart."""
    own = stored_forms(graph, dtype)
    asking = Forms(dtype, own, graph.constants)
    one = own[siblings[0].name]
    if one.layout != "nhwc" or any(_channels(node) * one.dtype.itemsize % VECTOR_BYTES for node in siblings):
        return False
    users = graph.users()
    readers = [(reader, node.name) for node in siblings for reader in users[node.name]]
    before = estimates.of_nodes([*siblings, *(reader for reader, _ in readers)], asking)
    after = estimates.of_nodes([joined], asking)
    if before is None or after is None:
        return False
    for reader, value in readers:
        us = _apart(reader, value, _channels(joined), asking, estimates)
        if us is None:
            return False
        after += us
    return after < before


def _apart(node: Node, value: str, pitch: int, forms: Forms, estimates: Estimates) -> float | None:
    """Microseconds of a node that reads pixels so many elements apart; None where it does not."""
    roles = [role for role, name in node.inputs.items() if name == value]
    lowered: Lowered | None = operator_of(node).lower(node, forms)
    if lowered is None or len(roles) != 1:
        return None
    try:
        problem = lowered.apart({roles[0]: pitch})
        if problem is None:
            return None
        chosen = estimates.chosen(replace(lowered, problem=problem))
    except UnsupportedError:
        return None
    return estimates.us(chosen) if chosen.problem == problem else None
