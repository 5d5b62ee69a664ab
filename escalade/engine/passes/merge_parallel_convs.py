"""Merge of parallel convolutions: the image is read once, and one larger launch fills the GPU better."""

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


def merge_parallel_convs(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Merge convolutions of one image that differ only in their filters, where the estimates favor it.

    Readers take a slice of the merged channels. Convolutions that are part of a concatenation are skipped: a value
    cannot be a part of two buffers.
    """
    for convs in _sibling_groups(graph):
        merged = operator_of(convs[0]).side_by_side(convs, graph)
        if merged is None:
            continue
        merged = replace(merged, name=graph.fresh(f"{convs[0].name}_joined"))
        if not _is_faster(convs, merged, graph, dtype, estimates):
            continue
        graph.insert_before(convs[0].name, merged)
        offset = 0
        for node in convs:
            graph.nodes[node.name] = Slice.instead_of(node, {"x": merged.name}, dimension=1, first=offset)
            offset += _channels(node)


def _sibling_groups(graph: Graph) -> list[list[Node]]:
    """Return groups of layers with the same input and attributes, whose readers can read a slice."""
    users = graph.users()
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph:
        readers = users.get(node.name, [])
        if len(node.shape) != 4 or node.name in graph.outputs or not readers:
            continue
        if any(
            operator_of(reader).concatenated(reader) or operator_of(reader).taken(reader)
            for reader in readers
        ):
            continue
        key = (
            operator_of(node),
            node.inputs.get("x"),
            repr(sorted(node.attributes.items())),
            tuple(node.inputs),
            node.shape[2:],
        )
        groups.setdefault(key, []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _channels(node: Node) -> int:
    channels = node.shape[1]
    assert isinstance(channels, int)
    return channels


def _is_faster(convs: Sequence[Node], merged: Node, graph: Graph, dtype: str, estimates: Estimates) -> bool:
    """Return True if the merged layer, with readers of strided pixels, is estimated to take less time."""
    stored = stored_forms(graph, dtype)
    forms = Forms(dtype, stored, graph.constants)
    form = stored[convs[0].name]
    if form.layout != "nhwc" or any(_channels(node) * form.dtype.itemsize % VECTOR_BYTES for node in convs):
        return False
    users = graph.users()
    readers = [(reader, node.name) for node in convs for reader in users[node.name]]
    before = estimates.total_us([*convs, *(reader for reader, _ in readers)], forms)
    after = estimates.total_us([merged], forms)
    if before is None or after is None:
        return False
    for reader, value in readers:
        us = _strided_time(reader, value, _channels(merged), forms, estimates)
        if us is None:
            return False
        after += us
    return after < before


def _strided_time(node: Node, value: str, pitch: int, forms: Forms, estimates: Estimates) -> float | None:
    """Return the time of a node that reads `value` with this pixel pitch in elements; None if it cannot."""
    roles = [role for role, name in node.inputs.items() if name == value]
    lowered: Lowered | None = operator_of(node).lower(node, forms)
    if lowered is None or len(roles) != 1:
        return None
    try:
        problem = lowered.apart({roles[0]: pitch})
        if problem is None:
            return None
        choice = estimates.choose(replace(lowered, problem=problem))
    except UnsupportedError:
        return None
    return estimates.us(choice) if choice.problem == problem else None
