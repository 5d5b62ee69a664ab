"""Fusion of pools into the preceding layer, which then never writes the unpooled image."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.pools import INDICES, AvgPool2d, MaxPool2d
from escalade.engine.nodes.side_outputs import SideOutput, readers_of, side_outputs_of
from escalade.engine.passes.estimates import Estimates, nhwc_forms
from escalade.errors import UnsupportedError


def fuse_max_pools(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Fuse pool(relu(conv(x))) into one step where nothing else reads the convolution and the estimates favor it.

    The layer then also writes the argmax indices of a max pool, if there are any.
    """
    forms: Forms | None = None
    for node in graph:
        layer = graph.nodes.get(node.inputs["x"]) if _has_adjacent_windows(node) else None
        if not Conv2d.matches(layer) or not _can_fuse(layer, node, graph):
            continue
        windows, writes_indices = node.attributes["kernel"], INDICES in node.attributes
        pooled = layer.with_attributes(pool=windows, places=writes_indices, mean=AvgPool2d.matches(node))
        fused = replace(pooled, name=node.name, shape=node.shape)
        forms = forms or nhwc_forms(graph, dtype)
        if _is_faster(layer, node, fused, forms, estimates):
            _apply(graph, layer, node, fused)


def _has_adjacent_windows(node: Node) -> bool:
    """Return True for a pool whose windows neither overlap nor leave gaps."""
    a = node.attributes
    if AvgPool2d.matches(node):
        is_plain = not a["divisor"] and "prologue" not in a
    else:
        is_plain = MaxPool2d.matches(node) and a["dilation"] == (1, 1)
    return is_plain and a["kernel"] == a["stride"] and a["padding"] == (0, 0)


def _can_fuse(layer: Node, pool: Node, graph: Graph) -> bool:
    """Return True if only the pool reads the layer, dtypes are equal, and no window reaches over the edge."""
    a = layer.attributes
    if a.get("quantized") or "pool" in a:
        return False
    if INDICES in pool.attributes and pool.attributes["behind_relu"] != a["relu"]:
        return False
    own = {pool.name, *(node.name for node in side_outputs_of(pool, graph))}
    if layer.name in graph.outputs or {node.name for node in readers_of(layer, graph)} - own:
        return False
    types = {graph.dtype_of(name) for name in layer.inputs.values()}
    if graph.typed and types != {graph.dtype_of(layer.name)}:
        return False
    sizes = zip(layer.shape[2:], pool.attributes["kernel"], strict=True)
    return tuple(size // rows for size, rows in sizes if isinstance(size, int)) == pool.shape[2:]


def _is_faster(layer: Node, pool: Node, fused: Node, forms: Forms, estimates: Estimates) -> bool:
    """Return True if a rung for both is estimated to take less time than the two steps."""
    layer_forms = forms.of(layer)
    if layer_forms is None:
        return False
    try:
        lowered = operator_of(fused).lower(fused, layer_forms)
        choice = None if lowered is None else estimates.choose(lowered)
    except UnsupportedError:
        return False
    if lowered is None or choice is None or choice.problem != lowered.problem:
        return False
    separate = estimates.total_us((layer, pool), layer_forms)
    return separate is not None and estimates.us(choice) < separate


def _apply(graph: Graph, layer: Node, pool: Node, fused: Node) -> None:
    fused = replace(fused, source=joint_source(layer, pool))
    for aux in side_outputs_of(pool, graph):
        graph.nodes[aux.name] = SideOutput.of(fused, aux.name, aux.attributes["buffer"], aux.shape, aux.dtype)
    graph.nodes[fused.name] = fused
    del graph.nodes[layer.name]
