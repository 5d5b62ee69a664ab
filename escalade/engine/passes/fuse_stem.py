"""Fusion of convolutions of few channels, such as the first one, with the normalization before and the pool after."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes.base import activation_fields
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.convert import Normalize
from escalade.engine.nodes.elementwise import Relu
from escalade.engine.nodes.pools import MaxPool2d
from escalade.engine.nodes.stem import MAX_CHANNELS, FewChannels, Stem
from escalade.ops.base.dtypes import QUANTIZED

DTYPES = ("fp16", "bf16", *QUANTIZED)
MAX_FILTER_WIDTH = 8
MAX_FILTERS, FILTER_UNIT = 128, 16
MAX_SMALL_FILTERS = 32
"""Filters, beside MAX_CHANNELS channels, up to which a convolution is fused; with more, a pixel fills a vector load and
the tensor cores, and an ordinary convolution is faster."""
_POOLS = ((3, 2, 1), (2, 2, 0))
"""Supported max pools: kernel, stride, padding."""


def fuse_stem(graph: Graph) -> None:
    """Replace every convolution of a graph input that the stem's kernels support."""
    inputs = {entry.name for entry in graph.inputs}
    for node in graph:
        if not Conv2d.matches(node) or not _is_stem(graph, node):
            continue
        image, normalization = node.inputs["x"], graph.nodes.get(node.inputs["x"])
        operands = dict(node.inputs)
        if Normalize.matches(normalization):
            if graph.only_user(normalization.name) is not node:
                continue
            image = normalization.inputs["x"]
            operands |= {role: normalization.inputs[role] for role in ("scale", "shift")}
        if image not in inputs:
            continue
        stem = Stem.instead_of(
            node, {**operands, "x": image},
            stride=node.attributes["stride"], padding=node.attributes["padding"], pool=None, **activation_fields(node),
        )  # fmt: skip
        graph.nodes[node.name] = stem
        pool = graph.only_user(node.name)
        if MaxPool2d.matches(pool) and (window := _window(pool)) in _POOLS:
            pooled = stem.with_attributes(pool=window)
            graph.nodes[node.name] = replace(pooled, shape=pool.shape, source=joint_source(stem, pool))
            graph.remove(pool, instead=stem.name)


def _is_stem(graph: Graph, node: Node) -> bool:
    filters, channels, _, filter_width = graph.constants[node.inputs["weight"]].shape
    return (
        channels <= MAX_CHANNELS
        and filter_width <= MAX_FILTER_WIDTH
        and filters % FILTER_UNIT == 0
        and filters <= MAX_FILTERS
        and node.attributes["groups"] == 1
        and node.attributes["dilation"] == (1, 1)
        and "bias" in node.inputs
        and has_one_input(node)
    )


def _window(pool: Node) -> tuple[int, ...] | None:
    """Return kernel, stride and padding of a max pool with square windows."""
    a = pool.attributes
    windows = [a[key] for key in ("kernel", "stride", "padding")]
    if a["ceil_mode"] or a["dilation"] != (1, 1) or any(rows != columns for rows, columns in windows):
        return None
    return tuple(rows for rows, _ in windows)


def fuse_few_channels(graph: Graph) -> None:
    """Replace every convolution that is small enough; the stem has been fused before."""
    for node in graph:
        if not Conv2d.matches(node) or not _is_small(graph, node):
            continue
        inputs, normalized = _fold_normalization(graph, node)
        graph.nodes[node.name] = FewChannels.instead_of(
            node, inputs,
            padding=node.attributes["padding"], pool=1, ceil_mode=False, normalised=normalized,
            **activation_fields(node),
        )  # fmt: skip
        if not node.attributes.get("activation"):  # only ReLU commutes with a maximum
            _fuse_pool(graph, graph.nodes[node.name])


def _is_small(graph: Graph, node: Node) -> bool:
    filters, channels = graph.constants[node.inputs["weight"]].shape[:2]
    a = node.attributes
    return (
        channels <= MAX_CHANNELS
        and filters <= MAX_SMALL_FILTERS
        and (a["stride"], a["dilation"], a["groups"]) == ((1, 1), (1, 1), 1)
        and has_one_input(node)
    )


def _fold_normalization(graph: Graph, node: Node) -> tuple[dict[str, str], bool]:
    """Fold a preceding normalization into the weights: w (s x + t) = (w s) x + sum(w) t. Return the inputs.

    Only without padding, whose zeros come after the normalization. An image of several channels has to be converted
    to NHWC anyway, and is normalized by the conversion.
    """
    normalization = graph.nodes.get(node.inputs["x"])
    if not Normalize.matches(normalization) or graph.only_user(normalization.name) is not node:
        return dict(node.inputs), False
    weight = graph.constants[node.inputs["weight"]].double()
    if weight.shape[1] != 1 or node.attributes["padding"] != (0, 0):
        return dict(node.inputs), False
    scale, shift = (graph.constants[normalization.inputs[role]].double() for role in ("scale", "shift"))
    bias = weight.sum((1, 2, 3)) * shift
    if "bias" in node.inputs:
        bias = bias + graph.constants[node.inputs["bias"]].double()
    inputs = {
        "x": normalization.inputs["x"],
        "weight": graph.add_constant(f"{node.name}_weight", (weight * scale).float()),
    }
    if "bias" in node.inputs or bool(bias.any()):
        inputs["bias"] = graph.add_constant(f"{node.name}_bias", bias.float())
    del graph.nodes[normalization.name]
    return inputs, True


def _fuse_pool(graph: Graph, node: Node) -> None:
    """Fuse a max pool, and a ReLU after it: the maximum of ReLUs is the ReLU of the maximum."""
    pool = graph.only_user(node.name)
    if not MaxPool2d.matches(pool) or not _has_square_tiles(pool):
        return
    pooled = node.with_attributes(pool=pool.attributes["kernel"][0], ceil_mode=pool.attributes["ceil_mode"])
    graph.nodes[node.name] = replace(pooled, shape=pool.shape, source=joint_source(node, pool))
    graph.remove(pool, instead=node.name)
    relu = graph.only_user(node.name)
    if Relu.matches(relu) and relu.attributes["limit"] is None:
        graph.nodes[node.name] = graph.nodes[node.name].with_attributes(relu=True)
        graph.remove(relu, instead=node.name)


def _has_square_tiles(pool: Node) -> bool:
    """Return True if windows are square and adjacent."""
    a = pool.attributes
    is_square = a["kernel"] == a["stride"] and a["kernel"][0] == a["kernel"][1] > 1
    return is_square and a["padding"] == (0, 0) and a["dilation"] == (1, 1)
