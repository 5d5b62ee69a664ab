"""Average pools moved from after a 1×1 convolution to before it, which leaves the convolution fewer pixels."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import stored_forms
from escalade.engine.nodes.base import activation_of, with_channels
from escalade.engine.nodes.conv2d import Conv2d, has_one_input, is_pixelwise
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.pools import AvgPool2d
from escalade.engine.passes.estimates import Estimates


def hoist_pools(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Replace pool(conv(x)) by conv(pool(x)) for average pools and 1×1 convolutions, where the estimates favor it."""
    for node in graph:
        layer = graph.nodes.get(node.inputs.get("x", ""))
        if layer is None or not _is_mean(node) or not _is_linear_map(layer, graph):
            continue
        if graph.only_user(layer.name) is not node:
            continue
        channels = graph.shape_of(layer.inputs["x"])[1]
        assert isinstance(channels, int)
        pool = replace(
            with_channels(node, channels),
            name=graph.fresh(f"{node.name}_first"),
            inputs={"x": layer.inputs["x"]},
        )
        mapped = replace(layer.with_inputs(x=pool.name), name=node.name, shape=node.shape)
        if _is_faster((layer, node), (pool, mapped), graph, dtype, estimates):
            graph.insert_before(node.name, pool)
            graph.nodes[node.name] = mapped
            del graph.nodes[layer.name]


def _is_mean(node: Node) -> bool:
    """Return True for an average pool whose weights sum to 1 in every window."""
    if not AvgPool2d.matches(node) or "prologue" in node.attributes:
        return False
    a = node.attributes
    return not a["divisor"] and (a["padding"] == (0, 0) or not a["count_padding"])


def _is_linear_map(node: Node, graph: Graph) -> bool:
    """Return True for a 1×1 convolution with nothing fused, which commutes with a mean over pixels."""
    if not Conv2d.matches(node) or not has_one_input(node) or not activation_of(node).is_identity:
        return False
    return is_pixelwise(node, graph) and node.attributes["stride"] == (1, 1)


def _is_faster(
    old: tuple[Node, Node], new: tuple[Node, Node], graph: Graph, dtype: str, estimates: Estimates
) -> bool:
    stored = stored_forms(graph, dtype)
    forms = Forms(dtype, stored, graph.constants)
    x, pool = old[0].inputs["x"], new[0]
    if x not in stored or stored[x].layout != stored[old[1].name].layout:
        return False
    forms.add(pool.name, replace(stored[old[1].name], shape=_static_shape(pool)))
    before, after = (estimates.total_us(nodes, forms) for nodes in (old, new))
    return before is not None and after is not None and after < before


def _static_shape(node: Node) -> tuple[int, ...]:
    return tuple(size for size in node.shape if isinstance(size, int))
