"""Pools next to other layers: fused into the layer before or after, or moved to where they leave it fewer pixels."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.forms import unquantized
from escalade.engine.graph.graph import Graph, Node, Shape, fixed_shape, joint_source
from escalade.engine.nodes import stored_forms
from escalade.engine.nodes.base import activation_of, with_channels
from escalade.engine.nodes.conv2d import Conv2d, has_one_input, is_pixelwise
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.lowering import Forms, problem_from
from escalade.engine.nodes.pools import INDICES, AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from escalade.engine.nodes.side_outputs import readers_of, side_outputs_of, with_producer
from escalade.engine.nodes.views import Reshape
from escalade.engine.passes.estimates import Estimates, assumed_forms
from escalade.ops.linear import LinearProblem, one_launch_pays


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
        forms = forms or assumed_forms(graph, dtype)
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
    """Return True if only the pool reads the layer, dtypes are equal, and no window exceeds the image."""
    a = layer.attributes
    if a.get("quantized") or "pool" in a:
        return False
    # Windows without a positive element have no index after a ReLU: the gradient expects the same rule.
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
    """Return True if a fused rung is estimated to take less time than the two steps."""
    layer_forms = forms.of(layer)
    choice = None if layer_forms is None else estimates.choice(fused, layer_forms, exact=True)
    if choice is None or layer_forms is None:
        return False
    separate = estimates.total_us((layer, pool), layer_forms)
    return separate is not None and estimates.us(choice) < separate


def _apply(graph: Graph, layer: Node, pool: Node, fused: Node) -> None:
    fused = replace(fused, source=joint_source(layer, pool))
    for aux in side_outputs_of(pool, graph):
        graph.nodes[aux.name] = with_producer(aux, fused)
    graph.nodes[fused.name] = fused
    del graph.nodes[layer.name]


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
        if _hoisting_is_faster((layer, node), (pool, mapped), graph, dtype, estimates):
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


def _hoisting_is_faster(
    old: tuple[Node, Node], new: tuple[Node, Node], graph: Graph, dtype: str, estimates: Estimates
) -> bool:
    stored = stored_forms(graph, dtype)
    forms = Forms(dtype, stored, graph.constants)
    x, pool = old[0].inputs["x"], new[0]
    # Averaging first must not add a conversion.
    if x not in stored or stored[x].layout != stored[old[1].name].layout:
        return False
    forms.add(pool.name, replace(stored[old[1].name], shape=fixed_shape(pool.shape, 1)))
    return estimates.favor(new, old, forms)


def fuse_pooled_linear(graph: Graph, dtype: str) -> None:
    """Replace linear(flatten(mean(x))) by one step that reads the NHWC image x, where one launch is faster."""
    for node in graph:
        if not AdaptiveAvgPool2d.is_nhwc_mean(node):
            continue
        image = graph.shape_of(node.inputs["x"])
        rows = graph.only_user(node.name)
        if not Reshape.matches(rows) or rows.shape != image[:2]:
            continue
        layer = graph.only_user(rows.name)
        quantized = node.attributes.get("quantized", "")
        if quantized and image[2:] == (1, 1):
            continue  # the layer reads bytes only to take means
        if not Linear.matches(layer) or not one_launch_pays(_problem(graph, layer, image, dtype, quantized)):
            continue
        pooled = layer.with_inputs(**node.inputs).with_attributes(pooled=True)
        if quantized:
            pooled = pooled.with_attributes(quantized=quantized)
        graph.nodes[layer.name] = replace(pooled, source=joint_source(node, layer))
        del graph.nodes[node.name], graph.nodes[rows.name]


def _problem(graph: Graph, layer: Node, image: Shape, dtype: str, quantized: str) -> LinearProblem:
    batch, _, height, width = image
    assert isinstance(batch, int) and isinstance(height, int) and isinstance(width, int)
    outputs, features = graph.constants[layer.inputs["weight"]].shape
    return problem_from(
        LinearProblem, layer,
        batch=batch, in_features=features, out_features=outputs, dtype=unquantized(dtype),
        pixels=height * width, x_dtype=quantized,
    )  # fmt: skip
