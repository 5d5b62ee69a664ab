"""Means over windows taken in front of 1×1 convolutions instead of behind them, where fewer pixels are left then."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.base import with_channels
from escalade.engine.nodes.lowering import Forms
from escalade.engine.passes.estimates import Estimates


def pool_first(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """The mean of a 1×1 convolution's pixels is the convolution of their mean, which has less to do."""
    for node in graph:
        layer = graph.nodes.get(node.inputs.get("x", ""))
        if layer is None or not operator_of(node).is_mean_of_pixels(node):
            continue
        if not operator_of(layer).is_map_of_pixels(layer, graph) or graph.only_user(layer.name) is not node:
            continue
        channels = graph.shape_of(layer.inputs["x"])[1]
        assert isinstance(channels, int)
        pool = replace(
            with_channels(node, channels),
            name=graph.fresh(f"{node.name}_first"),
            inputs={"x": layer.inputs["x"]},
        )
        mapped = replace(layer.with_inputs(x=pool.name), name=node.name, shape=node.shape)
        if _pays((layer, node), (pool, mapped), graph, dtype, estimates):
            graph.insert_before(node.name, pool)
            graph.nodes[node.name] = mapped
            del graph.nodes[layer.name]


def _pays(
    now: tuple[Node, Node], then: tuple[Node, Node], graph: Graph, dtype: str, estimates: Estimates
) -> bool:
    lying = stored_forms(graph, dtype)
    forms = Forms(dtype, lying, graph.constants)
    x, pool = now[0].inputs["x"], then[0]
    if x not in lying or lying[x].layout != lying[now[1].name].layout:
        return False
    forms.add(pool.name, replace(lying[now[1].name], shape=_sizes(pool)))
    before, after = (estimates.of_nodes(nodes, forms) for nodes in (now, then))
    return before is not None and after is not None and after < before


def _sizes(node: Node) -> tuple[int, ...]:
    return tuple(size for size in node.shape if isinstance(size, int))
