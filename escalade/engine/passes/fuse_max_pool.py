"""Maxima of windows taken on the way out of the layer in front of them, which then never writes what they are of."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.side_outputs import Further, furthers_of, readers_of
from escalade.engine.passes.estimates import Estimates
from escalade.errors import UnsupportedError


def take_maxima(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """pool(relu(conv(x))) becomes one step where nothing else reads what lies between, and where by the estimates one
    takes less time than two. What else the pool writes, the places of its maxima, the layer does."""
    forms: Forms | None = None
    for node in graph:
        windows = operator_of(node).windows_of_maxima(node)
        layer = graph.nodes.get(node.inputs["x"]) if windows is not None else None
        if windows is None or layer is None or not _is_alone(layer, node, windows, graph):
            continue
        taking = operator_of(layer).taking_maxima(layer, node, windows)
        if taking is None:
            continue
        forms = forms or _forms(graph, dtype)
        if _pays(layer, node, taking, forms, estimates):
            _take(graph, layer, node, taking)


def _is_alone(layer: Node, pool: Node, windows: tuple[int, int], graph: Graph) -> bool:
    """Whether nothing but a pool reads a layer's result, of one type with all that the layer reads, and no window
    reaches over its edge."""
    own = {pool.name, *(one.name for one in furthers_of(pool, graph))}
    if layer.name in graph.outputs or {one.name for one in readers_of(layer, graph)} - own:
        return False
    types = {graph.dtype_of(name) for name in layer.inputs.values()}
    if graph.typed and types != {graph.dtype_of(layer.name)}:
        return False
    sizes = zip(layer.shape[2:], windows, strict=True)
    return tuple(size // rows for size, rows in sizes if isinstance(size, int)) == pool.shape[2:]


def _forms(graph: Graph, dtype: str) -> Forms:
    """How values lie; inputs lie as their readers were told."""
    given = {
        one.name: Form(one.shape, graph.dtype_of(one.name) if graph.typed else STORAGE[dtype], "nhwc")  # type: ignore[arg-type]
        for one in graph.inputs
    }
    return Forms(dtype, given | stored_forms(graph, dtype), graph.constants, graph.typed)


def _pays(layer: Node, pool: Node, taking: Node, forms: Forms, estimates: Estimates) -> bool:
    """Whether a rung does both in less time than two that do one after the other."""
    asking = forms.of(layer)
    if asking is None:
        return False
    try:
        lowered = operator_of(taking).lower(taking, asking)
        together = None if lowered is None else estimates.chosen(lowered)
    except UnsupportedError:
        return False
    if lowered is None or together is None or together.problem != lowered.problem:
        return False
    alone = estimates.of_nodes((layer, pool), asking)
    return alone is not None and estimates.us(together) < alone


def _take(graph: Graph, layer: Node, pool: Node, taking: Node) -> None:
    source = ", ".join(dict.fromkeys(one.source for one in (layer, pool) if one.source))
    made = replace(taking, source=source)
    for one in furthers_of(pool, graph):
        graph.nodes[one.name] = Further.of(made, one.name, one.attributes["buffer"], one.shape, one.dtype)
    graph.nodes[made.name] = made
    del graph.nodes[layer.name]
