"""The layers that a quantized plan multiplies in 8 bits: of all sets, the one with the least estimated time.

Each set is a cut of a flow network, with the layers in 8 bits on the side of the source. The weights of cut edges are
times: of layers in 8 and in 16 bits, of results that are written in 16 bits because a reader needs that, and of steps
that only quantize values. A minimum cut is the fastest set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.convert import Quantize
from escalade.engine.nodes.lowering import Forms
from escalade.engine.passes.estimates import Estimates, assumed_forms

NEVER_US = 1e9
"""Weight of edges that are not cut: more than the time of a network."""
SMALLEST_US = 1e-6
"""Weight that rounding explains."""
_EIGHT, _SIXTEEN = "8 bits", "16 bits"

Edges = dict[str, dict[str, float]]


def fastest_layers(
    graph: Graph,
    plain: Graph,
    dtype: str,
    estimates: Estimates,
    layers: Collection[str],
    writers: Collection[str],
    flexible: Collection[str],
    joined: Iterable[Collection[str]],
) -> set[str]:
    """Return the nodes among `layers` to multiply in 8 bits.

    `plain` is the graph before channels were padded. `writers` store bytes without reading any, and `flexible` nodes
    read bytes as well as 16 bits. Of each set in `joined`, all layers are returned, or none.
    """
    forms, plain_forms = assumed_forms(graph, dtype), assumed_forms(plain, dtype)
    edges: Edges = defaultdict(lambda: defaultdict(float))

    def time_of(node: Node, forms: Forms) -> float:
        us = estimates.total_us([node], forms)
        return NEVER_US if us is None else us

    def readers_of(value: str) -> set[str]:
        """Return the layers that read a value, and the side of all readers that need 16 bits."""
        found = {reader.name for reader in graph.readers(value)} - {*flexible}
        is_wide = value in graph.outputs or not found <= {*layers}
        return (found & {*layers}) | ({_SIXTEEN} if is_wide else set())

    for name in [*layers, *writers]:
        node = graph.nodes[name]
        marked = node.with_attributes(quantized=dtype) if name in layers else node
        narrow, wide = (time_of(marked.with_attributes(store=store), forms) for store in (dtype, None))
        if name in layers:
            edges[name][_SIXTEEN] += narrow
            edges[_EIGHT][name] += time_of(plain.nodes[name], plain_forms)
        _join(edges, {name} if name in layers else {_EIGHT}, readers_of(name), max(0.0, wide - narrow))
    for value in {value: None for name in layers for value in graph.nodes[name].inputs.values()}:
        if value not in graph.constants:
            readers = readers_of(value)
            writer = {value} & {*layers} or ({_EIGHT} if value in writers else {_SIXTEEN})
            copy = Quantize.node(f"{value}_{dtype}", {"x": value}, {"store": dtype}, graph.shape_of(value))
            _join(edges, readers - {_SIXTEEN}, readers | writer, time_of(copy, forms))
    for names in joined:
        members = [name if name in layers else _SIXTEEN for name in names]
        for name, other in pairwise([*members, members[0]]):
            edges[name][other] = NEVER_US
    return _side_of_source(edges) & {*layers}


def _join(edges: Edges, some: Collection[str], others: Collection[str], us: float) -> None:
    """Add a time that is needed if any node of `some` has 8 bits, and any of `others` 16."""
    first, last = f"in {len(edges)}", f"out {len(edges)}"
    for name in some:
        edges[name][first] = NEVER_US
    for name in others:
        edges[last][name] = NEVER_US
    edges[first][last] = us


def _side_of_source(edges: Edges) -> set[str]:
    """Return the nodes on the source's side of a minimum cut: after the largest flow, by shortest paths."""
    while True:
        before = {_EIGHT: _EIGHT}
        queue = [_EIGHT]
        for name in queue:
            for other, left in edges[name].items():
                if left > SMALLEST_US and other not in before:
                    before[other] = name
                    queue.append(other)
        if _SIXTEEN not in before:
            return {*before}
        path = [_SIXTEEN]
        while path[-1] != _EIGHT:
            path.append(before[path[-1]])
        flow = min(edges[name][other] for other, name in pairwise(path))
        for other, name in pairwise(path):
            edges[name][other] -= flow
            edges[other][name] += flow
